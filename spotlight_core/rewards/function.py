"""A reward of your own: any Python function ``score(image, prompt) -> float`` in a file."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.types import PromptRow


class FunctionReward:
    """Calls the function for each image (uint8 ``[height, width, 3]``) and checks what it answers."""

    def __init__(self, file: Path, name: str) -> None:
        self.name = f"{file.name}:{name}"
        self._function = _load(file, name)

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """The function's answers.

        Raises:
            ScorerError: an answer that is not a finite number in 0..1.
        """
        return [
            self._checked(self._function(image, prompt.text))
            for image, prompt in zip(images, prompts, strict=True)
        ]

    def _checked(self, answer: object) -> float:
        try:
            value = float(answer)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            value = math.nan
        if not 0.0 <= value <= 1.0:
            raise ScorerError(f"reward {self.name} answered {answer!r}", "return a finite number from 0 to 1")
        return value


def _load(file: Path, name: str) -> Callable[[np.ndarray, str], object]:
    if not file.is_file():
        raise BadInputError(f"no reward file {file}", "set reward.file to an existing Python file")
    spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise BadInputError(f"{file} is not a Python file", "give reward.file a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any fault of the user's own module, syntax errors included
        raise BadInputError(f"{file} cannot be imported", f"{type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInputError(f"{file} has no function {name!r}", "set reward.name to the function's name")
    return function
