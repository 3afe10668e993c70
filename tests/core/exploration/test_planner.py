"""Planners without memory: the same arm always, and no state."""

import pytest

from spotlight_core.config import FixedArmConfig, NoExplorationConfig
from spotlight_core.errors import BadInputError
from spotlight_core.exploration.planner import Arm, build_planner


def test_the_arms_of_the_recipe() -> None:
    assert build_planner(NoExplorationConfig()).plan(3) is None
    fixed = build_planner(FixedArmConfig(type="fixed_arm", seeds_per_prompt=8, effective_steps=4))
    assert [fixed.plan(n) for n in (0, 7)] == [Arm(seeds_per_prompt=8, effective_steps=4)] * 2


@pytest.mark.parametrize("config", [NoExplorationConfig(), FixedArmConfig(type="fixed_arm")])
def test_planners_without_memory_refuse_anothers_state(
    config: NoExplorationConfig | FixedArmConfig,
) -> None:
    planner = build_planner(config)
    assert planner.state_dict() == {}
    planner.load_state_dict({})
    with pytest.raises(BadInputError, match=r"the state \['pulls'\] of another exploration planner"):
        planner.load_state_dict({"pulls": [1]})
