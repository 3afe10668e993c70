"""The engine in a group: the same request at any degree, and at one that changes at every boundary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spotlight_core.arrays import Arrays
from spotlight_core.config import FixedWindowConfig, FlowSdeConfig
from spotlight_core.diffusion.engine import Broken, DenoiseEngine, Generated, Paused
from spotlight_core.errors import SpotlightError, TrainingError
from spotlight_core.parallel.communicator import GroupBrokenError
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from tests.core.parallel.families import MODELS, copies, inputs, model_of
from tests.core.parallel.threads import ThreadCommunicator, in_group

STEPS, WINDOW = 5, (1, 3)
SDE = FlowSdeConfig(
    type="flow_sde",
    denoise_steps=STEPS,
    window=FixedWindowConfig(type="fixed", first=WINDOW[0], end=WINDOW[1]),
)
DEGREES = (1, 2, 4, 2, 1)
REQUEST = GenerationRequest(
    id="r",
    kind="rollout",
    prompts=(Prompt(occurrence="p0", text='A door with the number "407"'),),
    seeds=(0, 1),
    policy=PolicyVersion(label="old", number=0, digest=""),
    fidelity=Fidelity(denoise_steps=STEPS, reused_steps=(3,), sde_steps=WINDOW),
)
Outcome = Generated | Paused | Broken | None


def engines(model: Any, count: int) -> list[DenoiseEngine]:
    # Into the cache that the copies share: one tokenizer cannot be used by several threads at once.
    model.encode([prompt.text for prompt in REQUEST.prompts])
    return [DenoiseEngine(own, SDE, rng_seed=3, record_means=True) for own in copies(model, count)]


def stop_before(denoise_step: int | None) -> Callable[[int, Callable[[], Arrays]], bool]:
    return lambda following, state: following == denoise_step


def together(group: list[DenoiseEngine], first: int, state: Arrays | None, stop: int | None) -> list[Outcome]:
    """One stretch of denoise steps on a group; the leader has the state and is asked."""

    def work(communicator: ThreadCommunicator) -> Outcome:
        leads = communicator.rank == 0
        return group[communicator.rank].generate(
            REQUEST,
            from_denoise_step=first,
            state=state if leads else None,
            boundary=stop_before(stop) if leads else _nobody_asks,
            communicator=communicator,
        )

    return in_group(len(group), work)


def _nobody_asks(denoise_step: int, state: Callable[[], Arrays]) -> bool:
    raise AssertionError("only the leader is asked at a boundary")


def alone(model: Any) -> Arrays:
    outcome = engines(model, 1)[0].generate(REQUEST)
    assert isinstance(outcome, Generated)
    return outcome.arrays


def close(found: Arrays, expected: Arrays, tolerance: float) -> None:
    assert found.keys() == expected.keys() >= {"x0", "images", "x_TBSC", "logp_TB", "mean_TBSC"}
    for name in found.keys() - {"images"}:
        scale = max(1.0, float(np.abs(expected[name]).max()))
        assert np.abs(found[name] - expected[name]).max() / scale < tolerance, name
    assert np.abs(found["images"].astype(int) - expected["images"].astype(int)).max() <= 1


@pytest.mark.parametrize(("name", "degree"), [*((name, 3) for name in MODELS), ("tiny", 2), ("tiny", 4)])
def test_a_request_on_a_group_is_the_request_on_one_rank(
    name: str, degree: int, folders: dict[str, Path]
) -> None:
    model = model_of(name, folders)
    leader, *others = together(engines(model, degree), 0, None, None)
    assert isinstance(leader, Generated)
    assert others == [None] * (degree - 1), "one decodes, for all"
    close(leader.arrays, alone(model), 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_trajectory_whose_degree_changes_at_every_boundary(name: str, folders: dict[str, Path]) -> None:
    model = model_of(name, folders)
    state: Arrays | None = None
    for step, degree in enumerate(DEGREES):
        last = step + 1 == STEPS
        outcomes = together(engines(model, degree), step, state, None if last else step + 1)
        if last:
            assert isinstance(outcomes[0], Generated)
            close(outcomes[0].arrays, alone(model), 1e-4)
            return
        for outcome in outcomes:
            assert isinstance(outcome, Paused)
            assert outcome.next_denoise_step == step + 1
        # Whoever is left next has it all: the last rank as well as the first.
        kept = [outcome.state for outcome in outcomes if isinstance(outcome, Paused)]
        for other in kept:
            assert all(np.array_equal(other[key], kept[0][key]) for key in kept[0])
        state = kept[-1]


def test_survivors_of_a_broken_group_keep_the_last_boundary(folders: dict[str, Path]) -> None:
    model = model_of("tiny", folders)
    group = engines(model, 3)

    def work(communicator: ThreadCommunicator) -> Outcome:
        if communicator.rank == 1:  # gone in the middle of the third denoise step
            allowed, hear = 2 * 10 + 4, communicator._hear

            def until(words: Any) -> list[Any]:
                if communicator.calls == allowed:
                    communicator.abort()
                return hear(words)

            communicator._hear = until  # type: ignore[method-assign]
        return group[communicator.rank].generate(REQUEST, communicator=communicator)

    for outcome in in_group(3, work):
        assert isinstance(outcome, Broken)
        assert outcome.next_denoise_step == 2
        assert outcome.state is not None
        assert np.array_equal(outcome.state["x_BSC"], outcome.state["x_TBSC"][-1])
        survivor = engines(model, 1)[0]
        rest = survivor.generate(REQUEST, from_denoise_step=2, state=outcome.state)
        assert isinstance(rest, Generated)
        close(rest.arrays, alone(model), 1e-4)


def test_what_breaks_in_the_first_step_left_nothing(folders: dict[str, Path]) -> None:
    group = engines(model_of("tiny", folders), 2)

    def work(communicator: ThreadCommunicator) -> Outcome:
        communicator.abort()
        return group[communicator.rank].generate(REQUEST, communicator=communicator)

    for outcome in in_group(2, work):
        assert isinstance(outcome, Broken)
        assert (outcome.next_denoise_step, outcome.state) == (0, None)


@pytest.mark.parametrize("error", [OSError("no space left"), SpotlightError("no space left", "free some")])
def test_an_error_of_one_rank_ends_the_wait_of_the_others(error: Exception, folders: dict[str, Path]) -> None:
    group = engines(model_of("tiny", folders), 2)

    def fails(denoise_step: int, state: Callable[[], Arrays]) -> bool:
        raise error

    def work(communicator: ThreadCommunicator) -> Outcome:
        if communicator.rank == 0:
            with pytest.raises(type(error), match="no space left"):
                group[0].generate(REQUEST, boundary=fails, communicator=communicator)
            with pytest.raises(GroupBrokenError):
                communicator.all_reduce(torch.zeros(2))
            return None
        return group[1].generate(REQUEST, communicator=communicator)

    outcome = in_group(2, work)[1]
    assert isinstance(outcome, Broken)
    assert outcome.next_denoise_step == 1


def test_latents_that_are_not_finite_fail_the_request_and_leave_the_group(folders: dict[str, Path]) -> None:
    group = engines(model_of("tiny", folders), 2)
    for engine in group:
        nn.init.constant_(engine.model.transformer.get_parameter("proj_out.bias"), float("nan"))

    def work(communicator: ThreadCommunicator) -> bool:
        with pytest.raises(TrainingError, match="not finite"):
            group[communicator.rank].generate(REQUEST, communicator=communicator)
        return torch.equal(communicator.all_reduce(torch.ones(1)), torch.full((1,), 2.0))

    assert in_group(2, work) == [True, True]


def test_a_forward_outside_of_a_request_is_shared_with_nobody(folders: dict[str, Path]) -> None:
    model = model_of("tiny", folders)
    group = engines(model, 2)
    together(group, 0, None, None)
    x, sigma, text = inputs(model)
    with torch.inference_mode():
        assert torch.equal(group[1].model.velocity(x, sigma, text), model.velocity(x, sigma, text))


@pytest.mark.parametrize(("rank", "state"), [(0, None), (1, {"x_BSC": np.zeros((2, 8, 64), np.float32)})])
def test_the_leader_and_nobody_else_brings_the_state(
    rank: int, state: Arrays | None, folders: dict[str, Path]
) -> None:
    engine = engines(model_of("tiny", folders), 1)[0]

    def work(communicator: ThreadCommunicator) -> None:
        if communicator.rank == rank:
            with pytest.raises(ValueError, match="cannot start at denoise step 2 of 5"):
                engine.generate(REQUEST, from_denoise_step=2, state=state, communicator=communicator)
        else:
            with pytest.raises(GroupBrokenError):
                communicator.all_reduce(torch.zeros(1))

    in_group(2, work)
