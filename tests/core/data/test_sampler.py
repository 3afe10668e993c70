"""The group sampler is a function of its position."""

from spotlight_core.data.sampler import GroupSampler

PROMPTS = [f'A sign "{n}"' for n in range(5)]


def test_every_batch_is_full_and_a_pass_visits_each_prompt_once() -> None:
    sampler = GroupSampler(prompts=PROMPTS, rng_seed=0)
    batches = [sampler.batch(position, 3) for position in range(0, 15, 3)]
    assert [len(batch) for batch in batches] == [3] * 5
    flat = [prompt for batch in batches for prompt in batch]
    assert len({prompt.occurrence for prompt in flat}) == 15
    for first in (0, 5, 10):
        assert sorted(p.text for p in flat[first : first + 5]) == sorted(PROMPTS)


def test_position_alone_decides_and_the_seed_changes_the_order() -> None:
    sampler = GroupSampler(prompts=PROMPTS, rng_seed=0)
    assert sampler.batch(7, 4) == (*sampler.batch(7, 1), *sampler.batch(8, 3))
    assert sampler.batch(0, 5) != GroupSampler(prompts=PROMPTS, rng_seed=1).batch(0, 5)
