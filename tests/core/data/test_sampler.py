"""The group sampler is a function of its position."""

from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.data.sampler import GroupSampler
from spotlight_core.types import PromptRow

ROWS = [PromptRow(text=f'A sign "{n}"', metadata={"row": n}) for n in range(5)]


def test_every_batch_is_full_and_a_pass_visits_each_prompt_once() -> None:
    sampler = GroupSampler(prompts=ROWS, rng_seed=0)
    batches = [sampler.batch(position, 3) for position in range(0, 15, 3)]
    assert [len(batch) for batch in batches] == [3] * 5
    flat = [prompt for batch in batches for prompt in batch]
    assert len({prompt.occurrence for prompt in flat}) == 15
    for first in (0, 5, 10):
        assert sorted(p.text for p in flat[first : first + 5]) == [row.text for row in ROWS]


def test_position_alone_decides_and_the_seed_changes_the_order() -> None:
    sampler = GroupSampler(prompts=ROWS, rng_seed=0)
    assert sampler.batch(7, 4) == (*sampler.batch(7, 1), *sampler.batch(8, 3))
    assert sampler.batch(0, 5) != GroupSampler(prompts=ROWS, rng_seed=1).batch(0, 5)


def test_prompts_that_repeat_in_a_file_stay_apart_with_their_own_metadata() -> None:
    rows = [PromptRow(text="a bowl", metadata={"row": n}) for n in range(4)]
    batch = GroupSampler(prompts=rows, rng_seed=3).batch(0, 4)
    assert {prompt.text for prompt in batch} == {"a bowl"}
    assert len({prompt.occurrence for prompt in batch}) == 4
    assert sorted(prompt.metadata["row"] for prompt in batch) == [0, 1, 2, 3]


@given(
    prompts=st.integers(1, 40),
    groups=st.integers(1, 50),
    iterations=st.integers(1, 12),
    rng_seed=st.integers(0, 2**63 - 1),
)
def test_every_iteration_has_exactly_its_groups(
    prompts: int, groups: int, iterations: int, rng_seed: int
) -> None:
    rows = [PromptRow(text=f"prompt {n % 7}", metadata={"row": n}) for n in range(prompts)]
    sampler = GroupSampler(prompts=rows, rng_seed=rng_seed)
    batches = [sampler.batch(number * groups, groups) for number in range(iterations)]
    assert [len(batch) for batch in batches] == [groups] * iterations
    drawn = [prompt for batch in batches for prompt in batch]
    assert len({prompt.occurrence for prompt in drawn}) == groups * iterations
    counts = [sum(p.metadata["row"] == n for p in drawn) for n in range(prompts)]
    assert max(counts) - min(counts) <= 1
    assert all(prompt.text == f"prompt {prompt.metadata['row'] % 7}" for prompt in drawn)
    # A resumed run knows the position alone.
    assert (
        GroupSampler(prompts=rows, rng_seed=rng_seed).batch((iterations - 1) * groups, groups) == batches[-1]
    )
