"""What every part of a recipe is made of."""

from pydantic import BaseModel, ConfigDict

NO_FILE = "none"  # TOML has no null: how a recipe drops a file that the one it extends names


class Section(BaseModel):
    """A part of the recipe: frozen, documented field by field, no extra keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
