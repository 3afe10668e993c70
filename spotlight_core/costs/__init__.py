"""What things cost in seconds: measured by a profile, read off a recorded run, or published."""

from spotlight_core.costs.model import CostModel, StepCost

__all__ = ["CostModel", "StepCost"]
