"""A request on groups of real processes, which re-form between two denoise steps and lose a member in one."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from torch import nn

from spotlight_core.arrays import Arrays
from spotlight_core.diffusion.engine import Broken, DenoiseEngine, Generated, Paused
from spotlight_core.diffusion.tiny.model import TinyQwenImage
from tests.core.parallel.ranks import Node, RankState, running_node
from tests.core.parallel.test_engine_groups import REQUEST, SDE, alone, close

pytestmark = pytest.mark.slow  # four processes import diffusers

LAYOUTS = ((0,), (0, 1), (1, 0, 2, 3), (3, 1), (3,))  # whoever leads was there before
BOOT_SECONDS = 120.0
_generations = count(1)


class Rank:
    """What a rank's process keeps from one stretch of steps to the next."""

    model: TinyQwenImage
    engine: DenoiseEngine
    held: Arrays | None = None


def boot(state: RankState) -> None:
    """Build the model, in the rank's process."""
    Rank.model = TinyQwenImage.from_pretrained()
    Rank.engine = DenoiseEngine(Rank.model, SDE, rng_seed=3, record_means=True)


def die_in_forward(state: RankState, number: int) -> None:
    """Have this process killed in the middle of a forward that is to come."""
    forwards = count(1)

    def kill(module: nn.Module, args: Any) -> None:
        if next(forwards) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    block = Rank.model.transformer.get_submodule("transformer_blocks.2")
    block.register_forward_pre_hook(kill)


def stretch(
    state: RankState,
    kind: str,
    ranks: tuple[int, ...],
    generation: int,
    first: int,
    stop: int | None,
    result: Path,
) -> str:
    """Some denoise steps in a group; the leader has the state in its memory, and stops where it is told."""

    def boundary(denoise_step: int, make_state: Callable[[], Arrays]) -> bool:
        assert ranks[0] == state.rendezvous.rank
        return denoise_step == stop

    outcome = Rank.engine.generate(
        REQUEST,
        from_denoise_step=first,
        state=Rank.held if first and ranks[0] == state.rendezvous.rank else None,
        boundary=boundary,
        communicator=state.communicator(kind, ranks, generation),
    )
    if isinstance(outcome, Generated):
        save_file(dict(outcome.arrays), result)
    if isinstance(outcome, Paused | Broken):
        Rank.held = outcome.state
        return f"{type(outcome).__name__} before {outcome.next_denoise_step}"
    return "Generated" if outcome else "None"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node(ranks=4, slots=4) as node:
        for process in node.ranks.values():
            process.begin(boot)
        for process in node.ranks.values():
            process._pipe.poll(BOOT_SECONDS)  # longer than an answer may take otherwise
            process.answer()
        yield node


@pytest.fixture(scope="module")
def expected() -> Arrays:
    return alone(TinyQwenImage.from_pretrained())


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_trajectory_whose_group_changes_at_every_boundary(
    node: Node, kind: str, expected: Arrays, tmp_path: Path
) -> None:
    result = tmp_path / "result.safetensors"
    for step, ranks in enumerate(LAYOUTS):
        stop = step + 1 if step + 1 < len(LAYOUTS) else None
        told = node.ask(ranks, stretch, kind, ranks, next(_generations), step, stop, result)
        assert told == ["Generated" if stop is None else f"Paused before {stop}"] * len(ranks)
    close(load_file(result), expected, 1e-4)


# The last tests of this file: each costs the node a rank.
@pytest.mark.parametrize(("kind", "victim"), [("shm", 3), ("gloo", 2)])
def test_survivors_of_a_member_killed_in_mid_step_go_on_from_the_last_boundary(
    node: Node, kind: str, victim: int, expected: Arrays, tmp_path: Path
) -> None:
    result = tmp_path / "result.safetensors"
    ranks, generation = (0, victim, 1), next(_generations)
    node.ask([victim], die_in_forward, 3)
    for rank in ranks:
        node.ranks[rank].begin(stretch, kind, ranks, generation, 0, None, result)
    assert [node.ranks[rank].answer() for rank in (0, 1)] == ["Broken before 2"] * 2
    told = node.ask((1, 0), stretch, kind, (1, 0), next(_generations), 2, None, result)
    assert told == ["Generated", "None"]
    close(load_file(result), expected, 1e-4)
