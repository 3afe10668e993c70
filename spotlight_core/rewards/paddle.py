"""PaddleOCR as the engine of the OCR reward: an extra, imported only when a recipe asks for it."""

from collections.abc import Callable, Mapping, Sequence
from importlib import util
from typing import Any

import numpy as np

from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards.ocr import TextLine, upright

Predict = Callable[[np.ndarray], Sequence[Mapping[str, Any]]]
"""PaddleOCR's ``predict``: a BGR image to one page of results."""


class PaddleReader:
    """Reads through PaddleOCR 3's ``predict``."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict

    def read(self, image: np.ndarray) -> list[TextLine]:
        """What is written in ``image`` (uint8 ``[height, width, 3]``, RGB).

        Raises:
            ScorerError: an answer of another shape than PaddleOCR 3's.
        """
        pages = self._predict(np.ascontiguousarray(image[..., ::-1]))
        if len(pages) != 1:
            raise ScorerError(f"PaddleOCR answered {len(pages)} pages for one image", "install paddleocr 3")
        return parse_page(pages[0])


def open_paddle() -> Predict:
    """PaddleOCR with the steps meant for scanned documents switched off.

    Raises:
        BadInputError: the package is not installed.
    """
    for package in ("paddleocr", "paddle"):
        if util.find_spec(package) is None:
            raise BadInputError(
                f"reward.engine = 'paddleocr' needs the package {package}",
                "pip install 'spotlight-rl[paddleocr]'",
            )
    from paddleocr import PaddleOCR

    engine = PaddleOCR(
        use_doc_orientation_classify=False,
        use_doc_unwarping=False,
        use_textline_orientation=False,
        text_rec_score_thresh=0.0,
    )
    return engine.predict


def parse_page(page: Mapping[str, Any]) -> list[TextLine]:
    """The lines of one page: ``rec_texts``, ``rec_scores`` and the corners in ``rec_polys``.

    Raises:
        ScorerError: a key is missing, or the three differ in length.
    """
    try:
        texts, scores, corners = (page[key] for key in ("rec_texts", "rec_scores", "rec_polys"))
        return [
            TextLine(text=str(text), confidence=float(score), box_xyxy=upright(box))
            for text, score, box in zip(texts, scores, corners, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ScorerError(
            f"PaddleOCR's answer cannot be read ({type(error).__name__}: {error})", "install paddleocr 3"
        ) from error
