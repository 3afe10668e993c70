"""What every part of a recipe is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NO_FILE = "none"  # TOML has no null: how a recipe drops a file that the one it extends names


class Section(BaseModel):
    """A part of the recipe: frozen, documented field by field, no extra keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


Name = Annotated[str, Field(min_length=1)]
"""A hub id, a folder, a name of something: anything but nothing."""
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?|mps)$")]
"""Where tensors are computed: auto, cpu, cuda, cuda:N or mps."""
