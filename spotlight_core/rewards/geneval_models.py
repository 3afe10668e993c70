"""GenEval's eyes: a Mask2Former that finds the objects and a CLIP that names their colours.

Shape legend: B batch, Q query, N kept object, H W image, D embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForUniversalSegmentation

from spotlight_core.config import GenEvalRewardConfig
from spotlight_core.errors import BadInputError
from spotlight_core.rewards.clip import ClipTowers
from spotlight_core.rewards.geneval import (
    DETECTION_CONFIDENCE,
    Detection,
    needs_color,
    score_image,
)
from spotlight_core.rewards.geneval_metadata import CLASSES, COLORS, OTHER_SPELLINGS, check_metadata
from spotlight_core.rewards.pretrained import load_model, opened, scoring_device
from spotlight_core.types import PromptRow

_GREY = 153  # what surrounds an object whose colour is asked
_WORDINGS = (
    "a picture of one {color} {thing}",
    "a {thing} whose colour is {color}",
    "a picture of something {color}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A detection and its mask, bool ``[H, W]``."""

    detection: Detection
    mask_HW: np.ndarray


class GenEvalReward:
    """Detects, looks at the colours that matter, and scores by the clauses of the prompt's metadata."""

    name = "geneval"

    def __init__(self, config: GenEvalRewardConfig) -> None:
        """Load both models.

        Raises:
            BadInputError: one cannot be loaded, or does not know COCO's classes; no such device.
        """
        self.detector = ObjectDetector(config.detector, config.device)
        self.classifier = ColorClassifier(config.classifier, config.device)
        self._score = config.score

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """One score for each image (uint8 ``[B, H, W, 3]``) under its prompt's metadata.

        Raises:
            BadInputError: metadata that is not GenEval's.
        """
        for prompt in prompts:
            check_metadata(prompt.metadata)
        return [
            score_image(self._with_colors(image, found, prompt.metadata), prompt.metadata, self._score)
            for image, found, prompt in zip(images, self.detector.find(images), prompts, strict=True)
        ]

    def probes(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> dict[str, list[float]]:
        """What different images must differ in, by model: how sure each is of its best answer."""
        whole = np.ones(images.shape[1:3], dtype=bool)
        box = (0.0, 0.0, float(images.shape[2]), float(images.shape[1]))
        colors = [self.classifier.probabilities([cut_out(image, whole, box)], "thing") for image in images]
        return {
            "detector": self.detector.certainty(images),
            "colour classifier": [float(row.max()) for row in colors],
        }

    def _with_colors(self, image: np.ndarray, found: Sequence[Found], metadata: Any) -> list[Detection]:
        detections = [one.detection for one in found]
        wanted = {id(detection) for detection in needs_color(detections, metadata)}
        objects = [one for one in found if id(one.detection) in wanted]
        colors = dict(zip(map(id, objects), self.classifier.name_colors(image, objects), strict=True))
        return [replace(one.detection, color=colors.get(id(one))) for one in found]


class ObjectDetector:
    """Instance segmentation; scores are class probability times the mask's mean probability."""

    def __init__(self, path: str, device: str) -> None:
        self._device = scoring_device(device)
        self._model = load_model(AutoModelForUniversalSegmentation, path, self._device)
        # The PIL backend: the torchvision one resizes otherwise, and is not installed everywhere.
        self._pixels = opened(path, lambda: AutoImageProcessor.from_pretrained(path, backend="pil"))
        names = self._model.config.id2label
        self._labels = [OTHER_SPELLINGS.get(names[index], names[index]) for index in range(len(names))]
        missing = [name for name in CLASSES if name not in self._labels]
        if missing:
            raise BadInputError(
                f"the detector {path} does not know {len(missing)} of COCO's 80 classes, as {missing[0]!r}",
                "set reward.detector to an instance segmentation model trained on COCO",
            )

    @torch.inference_mode()
    def find(self, images: np.ndarray) -> list[list[Found]]:
        """The objects above the lowest threshold in each image (uint8 ``[B, H, W, 3]``)."""
        outputs, seen = self._run(images)
        size = (images.shape[1], images.shape[2])
        return [
            self._objects(classes_QC, masks_QHW, inside, size, outputs["padded"])
            for classes_QC, masks_QHW, inside in zip(outputs["classes"], outputs["masks"], seen, strict=True)
        ]

    @torch.inference_mode()
    def certainty(self, images: np.ndarray) -> list[float]:
        """The largest class probability of any query in each image, "nothing there" left out."""
        outputs, _ = self._run(images)
        return outputs["classes"].softmax(dim=-1)[..., :-1].amax(dim=(1, 2)).tolist()

    def _run(self, images: np.ndarray) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        """Class and mask logits, and the height and width of each image inside its padding."""
        inputs = self._pixels(images=[Image.fromarray(image) for image in images], return_tensors="pt")
        pixels, pixel_mask = (inputs[key].to(self._device) for key in ("pixel_values", "pixel_mask"))
        answer = self._model(pixel_values=pixels, pixel_mask=pixel_mask)
        inside = [(int(mask.any(dim=1).sum()), int(mask.any(dim=0).sum())) for mask in pixel_mask.bool()]
        outputs = {
            "classes": answer.class_queries_logits.float(),
            "masks": answer.masks_queries_logits.float(),
            "padded": tuple(pixels.shape[-2:]),
        }
        return outputs, inside

    def _objects(
        self,
        classes_QC: torch.Tensor,
        masks_QHW: torch.Tensor,
        inside: tuple[int, int],
        size: tuple[int, int],
        padded: tuple[int, int],
    ) -> list[Found]:
        """The objects of one image; as many (query, class) pairs are looked at as there are queries."""
        probabilities_QC = classes_QC.softmax(dim=-1)[:, :-1]
        queries, labels = probabilities_QC.shape
        best, flat = probabilities_QC.flatten().topk(queries)
        flat = flat[best > DETECTION_CONFIDENCE]  # the mask can only lower a score
        if not len(flat):
            return []
        logits_NHW = _full_size(masks_QHW[flat // labels], padded, inside, size)
        inside_NHW = logits_NHW > 0
        area_N = inside_NHW.sum(dim=(1, 2))
        mask_scores_N = (logits_NHW.sigmoid() * inside_NHW).sum(dim=(1, 2)) / (area_N + 1e-6)
        scores_N = probabilities_QC.flatten()[flat] * mask_scores_N
        return [
            Found(
                detection=Detection(
                    label=self._labels[int(flat[n]) % labels],
                    confidence=float(scores_N[n]),
                    box_xyxy=_box(mask_HW),
                ),
                mask_HW=mask_HW,
            )
            for n, mask_HW in enumerate(inside_NHW.cpu().numpy())
            if float(scores_N[n]) > DETECTION_CONFIDENCE and mask_HW.any()
        ]


class ColorClassifier:
    """CLIP, zero-shot over the ten colours: the mean of some wordings is a colour's direction."""

    def __init__(self, path: str, device: str) -> None:
        self._clip = ClipTowers(path, path, device)
        self._directions: dict[str, torch.Tensor] = {}

    def name_colors(self, image: np.ndarray, objects: Sequence[Found]) -> list[str]:
        """The colour of each object, cut out of ``image`` (uint8 ``[H, W, 3]``)."""
        colors = []
        for one in objects:
            crop = cut_out(image, one.mask_HW, one.detection.box_xyxy)
            colors.append(COLORS[int(self.probabilities([crop], one.detection.label)[0].argmax())])
        return colors

    def probabilities(self, crops: Sequence[np.ndarray], thing: str) -> np.ndarray:
        """fp32 ``[B, 10]`` over the colours, for crops of a ``thing``."""
        logits = self._clip.logit_scale * self._clip.images(crops) @ self._direction(thing).T
        return logits.softmax(dim=-1).numpy()

    def _direction(self, thing: str) -> torch.Tensor:
        """Unit rows fp32 ``[10, D]``."""
        if thing not in self._directions:
            rows = [
                self._clip.texts([wording.format(color=color, thing=thing) for wording in _WORDINGS]).mean(0)
                for color in COLORS
            ]
            self._directions[thing] = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
        return self._directions[thing]


def cut_out(image: np.ndarray, mask_HW: np.ndarray, box_xyxy: Sequence[float]) -> np.ndarray:
    """``image`` (uint8 ``[H, W, 3]``) inside ``box_xyxy``, everything beside the mask grey."""
    left, top, right, bottom = (round(edge) for edge in box_xyxy)
    alone = np.where(mask_HW[..., None], image, np.uint8(_GREY))
    return np.ascontiguousarray(alone[top:bottom, left:right])


def _full_size(
    masks_NHW: torch.Tensor, padded: tuple[int, int], inside: tuple[int, int], size: tuple[int, int]
) -> torch.Tensor:
    """Mask logits at the size of the image: enlarged to the model's input, padding cut off, resized."""
    masks = masks_NHW[None]
    for target, (height, width) in ((padded, inside), (size, size)):
        masks = torch.nn.functional.interpolate(masks, size=target, mode="bilinear", align_corners=False)
        masks = masks[..., :height, :width]
    return masks[0]


def _box(mask_HW: np.ndarray) -> tuple[float, float, float, float]:
    """The upright box around a mask, right and bottom exclusive."""
    columns, rows = (np.flatnonzero(mask_HW.any(axis=axis)) for axis in (0, 1))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
