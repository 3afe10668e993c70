"""The reward sections: what is trained for, and what is only evaluated."""

import string
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from spotlight_core.config.section import Device, Name, Section


class OcrRewardConfig(Section):
    type: Literal["ocr"] = "ocr"
    """An OCR engine reads the image; 1 - edit distance / length of the quoted target."""
    engine: Literal["rapidocr", "paddleocr"] = "rapidocr"
    """RapidOCR ships its weights; PaddleOCR is an extra (pip install 'spotlight-rl[paddleocr]')."""
    detect: bool = False
    """Find the lines of text first; else the whole image is read as one line."""
    characters: str = "0123456789"
    """Characters that a line read whole may hold; empty for all.  With detect, all are read."""

    @model_validator(mode="after")
    def _paddle_detects(self) -> "OcrRewardConfig":
        if self.engine == "paddleocr" and not self.detect:
            raise ValueError("engine paddleocr reads found lines only: set detect = true")
        return self


class TemplateRewardConfig(Section):
    type: Literal["template"]
    """Correlation with drawn glyphs of the embedded model's font: a check that OCR was not fooled."""


class JpegSizeRewardConfig(Section):
    type: Literal["jpeg_size"]
    """Smaller JPEGs score higher: a cheap reward for trying things out."""


class FunctionRewardConfig(Section):
    type: Literal["function"]
    """A Python function of your own: ``score(image, prompt) -> float`` in 0..1."""
    file: Path
    """The Python file that holds it."""
    name: Name = "score"
    """The function's name; ``image`` is uint8 ``[height, width, 3]``."""


class ScorerModelSection(Section):
    """Rewards that run a model through transformers."""

    device: Device = "auto"
    """A torch device; "auto" is the first GPU, else the CPU."""


class GenEvalRewardConfig(ScorerModelSection):
    type: Literal["geneval"]
    """Objects, counts, colours and places named in the prompt's metadata (arXiv 2310.11513)."""
    detector: Name = "facebook/mask2former-swin-small-coco-instance"
    """Instance segmentation model with COCO classes: hub id or folder."""
    classifier: Name = "openai/clip-vit-large-patch14"
    """CLIP that names the colour of an object: hub id or folder."""
    score: Literal["graded", "strict_correct", "correct", "compat"] = "graded"
    """graded trains; strict_correct wants equal counts; correct is the official metric; compat is the
    score of a public trainer, half credit on a wrong place and clauses below 0 included."""


class PickScoreRewardConfig(ScorerModelSection):
    type: Literal["pickscore"]
    """Human preference (arXiv 2305.01569): scaled cosine / 26, about .75 to .9."""
    path: Name = "yuvalkirstain/PickScore_v1"
    """The scoring CLIP: hub id or folder."""
    processor: Name = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Its tokenizer and image processor: hub id or folder."""


class ClipScoreRewardConfig(ScorerModelSection):
    type: Literal["clip_score"]
    """Cosine of image and prompt (arXiv 2104.08718), at least 0."""
    path: Name = "openai/clip-vit-large-patch14"
    """Hub id or folder."""


class VlmJudgeRewardConfig(Section):
    type: Literal["vlm_judge"]
    """A vision-language model behind an OpenAI-compatible endpoint grades the image from 0 to 10."""
    url: str
    """Base URL, as in http://127.0.0.1:8000/v1."""
    model: Name
    """Name of the served model."""
    question: str = (
        "Grade from 0 to 10 how well the image shows this prompt, quality and faithfulness together. "
        'Answer with JSON only: {{"grade": <number>}}.\nPrompt: {prompt}'
    )
    """What is asked; {prompt} is replaced."""
    api_key_variable: Name | None = None
    """Environment variable that holds the key, where the endpoint wants one; never the key itself."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Silence after which a call has failed."""
    attempts: int = Field(4, ge=1, le=20)
    """Calls for one image before the run stops."""
    concurrency: int = Field(8, ge=1, le=256)
    """Calls at the same time."""

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no http address: write it as in http://127.0.0.1:8000/v1")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:  # a port or an IPv6 address that is none
            raise ValueError(f"{url!r} is no http address ({error})") from error
        if not host or any(map(str.isspace, url)):
            raise ValueError(f"{url!r} names no host: write it as in http://127.0.0.1:8000/v1")
        return url.rstrip("/")

    @field_validator("question")
    @classmethod
    def _fillable(cls, question: str) -> str:
        """As ``str.format`` fills it in, with the prompt and nothing else."""
        remedy = "write {prompt} where the prompt goes, and other braces twice"
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(question) if name is not None]
            other = next((name for name in names if name != "prompt"), None)
            if other is not None:
                raise ValueError(f"nothing goes into {{{other}}}")
            question.format(prompt="a prompt")
        except (ValueError, LookupError) as error:
            raise ValueError(f"it cannot be filled in, {error}: {remedy}") from error
        if not names:
            raise ValueError(f"it has no {{prompt}}: {remedy}")
        return question


SingleRewardConfig = Annotated[
    OcrRewardConfig
    | TemplateRewardConfig
    | JpegSizeRewardConfig
    | FunctionRewardConfig
    | GenEvalRewardConfig
    | PickScoreRewardConfig
    | ClipScoreRewardConfig
    | VlmJudgeRewardConfig,
    Field(discriminator="type"),
]


class RewardPart(Section):
    """One of several rewards."""

    weight: float
    """What its score is multiplied with."""
    reward: SingleRewardConfig
    """The reward itself."""


class WeightedRewardConfig(Section):
    type: Literal["weighted"]
    """Several rewards at once; ``advantage.rewards`` says whether scores or advantages are added."""
    parts: tuple[RewardPart, ...] = Field(min_length=1)
    """The rewards and their weights."""

    @field_validator("parts")
    @classmethod
    def _distinct(cls, parts: tuple[RewardPart, ...]) -> tuple[RewardPart, ...]:
        types = [part.reward.type for part in parts]
        if len(set(types)) < len(types):
            raise ValueError(f"reward types {types} repeat: each may come once")
        if all(part.weight == 0 for part in parts):
            raise ValueError("every weight is 0: give one reward a weight")
        return parts


RewardConfig = Annotated[SingleRewardConfig | WeightedRewardConfig, Field(discriminator="type")]
