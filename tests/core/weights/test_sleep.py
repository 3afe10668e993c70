"""A model that lets its weights go and has them back."""

import pytest
import torch
from torch import nn

from spotlight_core.weights.sleep import SleepingModules

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_away_while_it_sleeps_and_come_back_bit_for_bit(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(device).eval()
    tied = nn.ModuleList([model, model])
    x = torch.randn(2, 4, device=device)
    before, expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}, model(x)
    sleeping = SleepingModules([tied])
    sleeping.sleep()
    sleeping.sleep()
    assert sleeping.asleep
    assert [parameter.numel() for parameter in model.parameters()] == [0] * 4
    with pytest.raises(RuntimeError):
        model(x)
    sleeping.wake()
    sleeping.wake()
    assert not sleeping.asleep
    assert {str(tensor.device.type) for tensor in model.state_dict().values()} == {device}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(model(x), expected)


def test_what_was_loaded_between_two_sleeps_is_kept() -> None:
    model = nn.Linear(2, 2)
    sleeping = SleepingModules([model])
    sleeping.sleep()
    sleeping.wake()
    with torch.no_grad():
        model.weight.fill_(7.0)
    sleeping.sleep()
    sleeping.wake()
    assert (model.weight == 7.0).all()


@NO_GPU
def test_a_gpu_is_given_back() -> None:
    model = nn.Linear(2048, 2048).cuda()
    sleeping = SleepingModules([model])
    awake = torch.cuda.memory_allocated()
    sleeping.sleep()
    assert torch.cuda.memory_allocated() <= awake - 2048 * 2048 * 4
    sleeping.wake()
    assert torch.cuda.memory_allocated() >= awake
