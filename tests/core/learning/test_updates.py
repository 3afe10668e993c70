"""From groups to updates to chunks: who is in which, and in what order the arrays lie."""

import numpy as np
import pytest
import torch

from spotlight_core.config import RunConfig
from spotlight_core.learning.updates import TrainingGroup, Update, advantages_of, chunks, split
from spotlight_core.recipes import load_recipe

TEXT = 'A "7"'
CPU = torch.device("cpu")


def _config(*overrides: str) -> RunConfig:
    return load_recipe("quickstart", overrides)


def _group(*rewards: float, prompt: str = TEXT, first: int | None = None, mark: float = 0.0) -> TrainingGroup:
    """Two trained steps of ``[K, 2, 1]`` latents that say where they belong: ``mark + 10 row + place``."""
    count = len(rewards)
    rows = mark + 10.0 * np.arange(count, dtype=np.float32)
    x_TBSC = np.stack([np.tile((rows + place)[:, None, None], (1, 2, 1)) for place in range(3)])
    arrays = {"x0": x_TBSC[-1]}
    if first is not None:
        arrays |= {"x_TBSC": x_TBSC, "logp_TB": x_TBSC[:2, :, 0, 0], "mean_TBSC": x_TBSC[1:]}
    steps = None if first is None else (first, first + 2)
    return TrainingGroup(prompt=prompt, rewards=np.array(rewards), arrays=arrays, sde_steps=steps)


def test_repeated_prompt_texts_are_separate_groups() -> None:
    """Taken together by text, the first group would be all below the mean and the second all above."""
    low, high = advantages_of([_group(0.0, 0.2), _group(0.8, 1.0)], _config())
    assert low.tolist() == pytest.approx([-0.1 / 0.1001, 0.1 / 0.1001])
    assert high.tolist() == pytest.approx(low.tolist())


def test_several_rewards_are_added_as_scores_or_as_advantages() -> None:
    parts = "{weight=1.0, reward={type='ocr'}}, {weight=0.5, reward={type='jpeg_size'}}"
    weighted = f"reward={{type='weighted', parts=[{parts}]}}"
    scores = {"ocr": np.array([0.0, 1.0, 0.5]), "jpeg_size": np.array([900.0, 300.0, 600.0])}
    total = scores["ocr"] + 0.5 * scores["jpeg_size"]
    group = TrainingGroup(prompt=TEXT, rewards=total, arrays={"x0": np.zeros((3, 2, 1))}, parts=scores)
    (by_score,) = advantages_of([group], _config(weighted))
    (by_advantage,) = advantages_of([group], _config(weighted, "advantage.rewards=normalise_each"))
    assert by_score.argmax() == 0
    assert by_advantage.argmax() == 1
    assert by_advantage.tolist() == pytest.approx([-0.5 * 1.5**0.5, 0.5 * 1.5**0.5, 0.0], rel=1e-3)


def test_constant_groups_are_left_out_and_still_count() -> None:
    groups = [_group(0.0, 1.0), _group(0.5, 0.5), _group(1.0, 0.0)]
    (update,) = split(groups, _config("optimizer.updates_per_iteration=1"), 0)
    assert update.samples == 6
    assert len(update.groups) == 2
    assert all(advantages.any() for _, advantages in update.groups)


def test_the_split_is_a_function_of_seed_and_iteration() -> None:
    groups = [_group(0.0, 1.0, mark=100.0 * number) for number in range(8)]

    def marks(config: RunConfig, iteration: int) -> list[list[float]]:
        updates = split(groups, config, iteration)
        return [[float(group.arrays["x0"][0, 0, 0]) for group, _ in update.groups] for update in updates]

    config = _config("optimizer.updates_per_iteration=3")
    assert marks(config, 4) == marks(config, 4)
    assert marks(config, 4) != marks(config, 5)
    assert marks(config, 4) != marks(_config("optimizer.updates_per_iteration=3", "rng_seed=1"), 4)
    assert [len(part) for part in marks(config, 4)] == [3, 3, 2]
    assert sorted(mark for part in marks(config, 4) for mark in part) == [
        100.0 * number + 2 for number in range(8)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_chunks_keep_every_row_with_its_window(size: int) -> None:
    early, late = _group(0.0, 1.0, 0.5, first=0), _group(1.0, 0.0, prompt='A "8"', first=5, mark=1000.0)
    advantages = [np.array([-1.0, 1.0, 0.5]), np.array([2.0, -2.0])]
    update = Update(number=0, groups=((early, advantages[0]), (late, advantages[1])), samples=5)
    cut = chunks(update, size, CPU)
    assert [len(chunk.prompts) for chunk in cut] == [size] * (5 // size) + ([5 % size] if 5 % size else [])
    assert [prompt for chunk in cut for prompt in chunk.prompts] == [TEXT] * 3 + ['A "8"'] * 2
    joined = {name: torch.cat([chunk.arrays[name] for chunk in cut]) for name in cut[0].arrays}
    marks = [0.0, 10.0, 20.0, 1000.0, 1010.0]
    assert joined["x_BTSC"].shape == (5, 3, 2, 1)
    assert joined["x_BTSC"][:, :, 0, 0].tolist() == [[mark, mark + 1, mark + 2] for mark in marks]
    assert joined["mean_BTSC"][:, :, 1, 0].tolist() == [[mark + 1, mark + 2] for mark in marks]
    assert joined["logp_BT"].tolist() == [[mark, mark + 1] for mark in marks]
    assert joined["steps_BT"].tolist() == [[0, 1]] * 3 + [[5, 6]] * 2
    assert joined["steps_BT"].dtype == torch.int64
    assert joined["x0"][:, 0, 0].tolist() == [mark + 2 for mark in marks]
    assert torch.cat([chunk.advantages_B for chunk in cut]).tolist() == [-1.0, 1.0, 0.5, 2.0, -2.0]


def test_chunks_of_images_alone_have_no_steps() -> None:
    update = Update(number=0, groups=((_group(0.0, 1.0), np.array([-1.0, 1.0])),), samples=2)
    (chunk,) = chunks(update, 16, CPU)
    assert set(chunk.arrays) == {"x0"}
