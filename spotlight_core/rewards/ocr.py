"""OCR reward: how much of the quoted target a real recogniser reads in the image.

``R = 1 - min(d, len) / len``: d is 0 when the target is a substring of what was read, else the
Levenshtein distance; both sides lose whitespace and case (the public Flow-GRPO OCR reward,
arXiv 2505.05470).
"""

from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from spotlight_core.data.prompts import quoted_target
from spotlight_core.errors import BadInputError

_MODEL = "PP-OCRv6_rec_small.onnx"
_INPUT_HEIGHT = 48  # the recogniser's own


def levenshtein(left: str, right: str) -> int:
    """Edits (insert, delete, replace) that turn ``left`` into ``right``."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(right, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def text_score(read: str, target: str) -> float:
    """``1 - min(d, len) / len`` of ``read`` against a non-empty ``target``, in 0..1."""
    read, target = ("".join(text.split()).lower() for text in (read, target))
    distance = 0 if target in read else min(levenshtein(read, target), len(target))
    return 1.0 - distance / len(target)


class OcrReward:
    """RapidOCR's own recognition model (PP-OCRv6, in its wheel), called on whole images.

    The detector is left out: the images hold one line of text, and on 16 x 32 pixels it costs three
    times the recogniser.  ``characters`` restricts what can be read, so that a smudge counts as a
    wrong digit and not as one of 18,000 other characters.
    """

    name = "ocr"

    def __init__(self, characters: str) -> None:
        self._session = _open_session()
        self._input = self._session.get_inputs()[0].name
        known = ["", *self._session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
        missing = sorted(set(characters) - set(known))
        if missing:
            raise BadInputError(
                f"reward.characters holds {missing[0]!r}, which the recogniser does not know", "remove it"
            )
        allowed = sorted({known.index(character) for character in characters}) or range(1, len(known))
        self._columns = np.array([0, *allowed])  # column 0 is CTC's blank
        self._characters = [known[column] for column in self._columns]

    def score(self, images: np.ndarray, prompts: Sequence[str]) -> list[float]:
        """The score of each image against its prompt's quoted target."""
        targets = [quoted_target(prompt) for prompt in prompts]
        return [text_score(read, target) for read, target in zip(self.read(images), targets, strict=True)]

    def read(self, images: np.ndarray) -> list[str]:
        """What the recogniser reads in each image (uint8 ``[B, height, width, 3]``)."""
        scores_BTC = self._session.run(None, {self._input: _recogniser_input(images)})[0]
        return [self._collapse(best) for best in scores_BTC[:, :, self._columns].argmax(axis=2)]

    def _collapse(self, best_T: np.ndarray) -> str:
        """CTC's greedy decoding: repeats are one character, blanks none."""
        fresh = np.append(True, best_T[1:] != best_T[:-1]) & (best_T != 0)
        return "".join(self._characters[column] for column in best_T[fresh])


def _recogniser_input(images: np.ndarray) -> np.ndarray:
    """fp32 ``[B, 3, 48, width]`` in [-1, 1], the aspect ratio kept."""
    height, width = images.shape[1:3]
    size = (max(round(_INPUT_HEIGHT * width / height), 1), _INPUT_HEIGHT)
    resized = [np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)) for image in images]
    scaled = np.stack(resized).astype(np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def _open_session() -> Any:  # onnxruntime ships no type information
    package = util.find_spec("rapidocr")
    if package is None or package.origin is None or util.find_spec("onnxruntime") is None:
        raise BadInputError(
            "the ocr reward needs rapidocr and onnxruntime", "pip install rapidocr onnxruntime"
        )
    model = Path(package.origin).parent / "models" / _MODEL
    if not model.is_file():
        raise BadInputError(f"rapidocr has no recognition model at {model}", "install rapidocr 3.10")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
