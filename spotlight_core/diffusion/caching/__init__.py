"""Cheaper previews by TeaCache (arXiv 2411.19108): which denoise steps reuse a velocity, calibrated once.

Importing this package imports no torch: planners read a table without a model.
"""

from spotlight_core.diffusion.caching.table import Schedule, StepTable

__all__ = ["Schedule", "StepTable"]
