"""OCR reward: how much of the quoted target a real recogniser reads in the image.

``R = 1 - min(d, len) / len``: d is 0 when the target is a substring of what was read, else the
Levenshtein distance; both sides lose whitespace and case (the public Flow-GRPO OCR reward,
arXiv 2505.05470).
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from spotlight_core.config import OcrRewardConfig
from spotlight_core.data.prompts import quoted_target
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards.base import Reward
from spotlight_core.types import PromptRow

_RECOGNISER = "PP-OCRv6_rec_small.onnx"
_DETECTOR = "PP-OCRv6_det_small.onnx"
_INPUT_HEIGHT = 48  # the recogniser's own


def open_ocr(config: OcrRewardConfig) -> Reward:
    """The OCR reward of a recipe.

    Raises:
        BadInputError: an engine that is not installed.
    """
    if config.engine == "paddleocr":
        from spotlight_core.rewards.paddle import PaddleReader, open_paddle

        return DetectOcrReward(PaddleReader(open_paddle()))
    return DetectOcrReward(RapidReader()) if config.detect else OcrReward(config.characters)


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
    read, target = (_plain(text) for text in (read, target))
    distance = 0 if target in read else min(levenshtein(read, target), len(target))
    return 1.0 - distance / len(target)


def _plain(text: str) -> str:
    """No whitespace, no case; an accent and its letter are one character, as recognisers write them."""
    return unicodedata.normalize("NFC", "".join(text.split()).lower())


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

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """The score of each image against its prompt's quoted target."""
        targets = [quoted_target(prompt.text) for prompt in prompts]
        return [text_score(read, target) for read, target in zip(self.read(images), targets, strict=True)]

    def read(self, images: np.ndarray) -> list[str]:
        """What the recogniser reads in each image (uint8 ``[B, height, width, 3]``)."""
        scores_BTC = self._session.run(None, {self._input: _recogniser_input(images)})[0]
        return [self._collapse(best) for best in scores_BTC[:, :, self._columns].argmax(axis=2)]

    def _collapse(self, best_T: np.ndarray) -> str:
        """CTC's greedy decoding: repeats are one character, blanks none."""
        fresh = np.append(True, best_T[1:] != best_T[:-1]) & (best_T != 0)
        return "".join(self._characters[column] for column in best_T[fresh])


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLine:
    """One piece of text that a detector found; ``box_xyxy`` in pixels, upright around it."""

    text: str
    confidence: float
    box_xyxy: tuple[float, float, float, float]

    @property
    def middle(self) -> float:
        """Of the height, in pixels from the top."""
        return (self.box_xyxy[1] + self.box_xyxy[3]) / 2

    @property
    def height(self) -> float:
        """In pixels."""
        return self.box_xyxy[3] - self.box_xyxy[1]


class Reader(Protocol):
    """An engine that finds and reads the text of an image."""

    def read(self, image: np.ndarray) -> Sequence[TextLine]:
        """What is written in ``image`` (uint8 ``[height, width, 3]``, RGB), in any order."""
        ...


class DetectOcrReward:
    """The lines are found first, wherever they are: for pictures with text in them."""

    name = "ocr"

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """The score of all that was read in each image against its prompt's quoted target."""
        targets = [quoted_target(prompt.text) for prompt in prompts]
        return [text_score(read, target) for read, target in zip(self.read(images), targets, strict=True)]

    def read(self, images: np.ndarray) -> list[str]:
        """All lines of positive confidence of each image, in reading order, with spaces between them."""
        return [
            " ".join(line.text for line in reading_order(self._reader.read(image)) if line.confidence > 0.0)
            for image in images
        ]


def reading_order(lines: Sequence[TextLine]) -> list[TextLine]:
    """Top to bottom, and left to right within a row.

    Two pieces are in one row when their middles are closer than half the height of the lower one;
    compared with the first of the row, so that a slanted column does not become a row.
    """
    rows: list[list[TextLine]] = []
    for line in sorted(lines, key=lambda line: (line.middle, line.box_xyxy[0])):
        first = rows[-1][0] if rows else None
        if first is not None and line.middle - first.middle < min(line.height, first.height) / 2:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows for line in sorted(row, key=lambda line: line.box_xyxy[0])]


class RapidReader:
    """RapidOCR's detector and recogniser (PP-OCRv6, in its wheel), on one thread."""

    def __init__(self) -> None:
        for model in (_DETECTOR, _RECOGNISER):
            _model_file(model)  # RapidOCR would download a missing one
        from rapidocr import RapidOCR

        threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
        # Upside-down lines would be turned by a third model: text that a viewer cannot read is no hit.
        fixed = {"Global.text_score": 0.0, "Global.use_cls": False, "Global.log_level": "error"}
        self._engine = RapidOCR(params=fixed | threads)

    def read(self, image: np.ndarray) -> list[TextLine]:
        """See ``Reader``.

        Raises:
            ScorerError: lines were found and not read.
        """
        from rapidocr.utils.output import RapidOCROutput

        found = self._engine(np.ascontiguousarray(image[..., ::-1]))  # it wants BGR
        if not isinstance(found, RapidOCROutput):
            raise ScorerError("scorer 'ocr' found text and read none", "install rapidocr 3.10")
        if found.boxes is None or found.txts is None or found.scores is None:
            return []
        return [
            TextLine(text=text, confidence=float(confidence), box_xyxy=upright(corners))
            for text, confidence, corners in zip(found.txts, found.scores, found.boxes, strict=True)
        ]


def upright(corners: Any) -> tuple[float, float, float, float]:
    """The upright box around corner points ``[n, 2]``."""
    points = np.asarray(corners, dtype=np.float64).reshape(-1, 2)
    (left, top), (right, bottom) = points.min(axis=0), points.max(axis=0)
    return float(left), float(top), float(right), float(bottom)


def _recogniser_input(images: np.ndarray) -> np.ndarray:
    """fp32 ``[B, 3, 48, width]`` in [-1, 1], the aspect ratio kept."""
    height, width = images.shape[1:3]
    size = (max(round(_INPUT_HEIGHT * width / height), 1), _INPUT_HEIGHT)
    resized = [np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)) for image in images]
    scaled = np.stack(resized).astype(np.float32) / 127.5 - 1.0
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def _model_file(name: str) -> Path:
    package = util.find_spec("rapidocr")
    if package is None or package.origin is None or util.find_spec("onnxruntime") is None:
        raise BadInputError(
            "the ocr reward needs rapidocr and onnxruntime", "pip install rapidocr onnxruntime"
        )
    model = Path(package.origin).parent / "models" / name
    if not model.is_file():
        raise BadInputError(f"rapidocr has no model at {model}", "install rapidocr 3.10")
    return model


def _open_session() -> Any:  # onnxruntime ships no type information
    model = _model_file(_RECOGNISER)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
