"""A model that lets its weights go and has them back."""

import pytest
import torch
from torch import nn

from spotlight_core.weights.sleep import SleepingModules


def test_on_a_cpu_shared_parameters_go_and_come_back_empty() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    shared = list(model[0].parameters())
    kept = {name: tensor.clone() for name, tensor in model[1].state_dict().items()}
    sleeping = SleepingModules([model], shared)
    assert not sleeping.asleep
    assert not sleeping.wake()
    sleeping.sleep()
    sleeping.sleep()
    assert sleeping.asleep
    assert [parameter.numel() for parameter in shared] == [0, 0]
    assert sleeping.wake()
    assert not sleeping.asleep
    assert [tuple(parameter.shape) for parameter in shared] == [(3, 4), (3,)]
    assert all(torch.equal(model[1].state_dict()[name], tensor) for name, tensor in kept.items())


def test_without_shared_parameters_a_cpu_keeps_all() -> None:
    model = nn.Linear(4, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sleeping = SleepingModules([model], [])
    sleeping.sleep()
    assert not sleeping.asleep
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_given_back_and_the_weights_return_bit_for_bit() -> None:
    model = nn.Linear(2048, 2048).cuda()
    tied = nn.ModuleList([model, model])
    before = {name: tensor.clone().cpu() for name, tensor in model.state_dict().items()}
    sleeping = SleepingModules([tied], list(model.parameters()))
    awake = torch.cuda.memory_allocated()
    sleeping.sleep()
    assert torch.cuda.memory_allocated() <= awake - 2048 * 2048 * 4
    assert not sleeping.wake()
    assert all(torch.equal(model.state_dict()[name].cpu(), tensor) for name, tensor in before.items())
