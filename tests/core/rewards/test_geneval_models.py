"""GenEval's detector and colour classifier, on tiny random models loaded as the real ones are."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from spotlight_core.config import GenEvalRewardConfig
from spotlight_core.errors import BadInputError
from spotlight_core.rewards.base import build_reward
from spotlight_core.rewards.geneval import Detection
from spotlight_core.rewards.geneval_metadata import CLASSES, COLORS
from spotlight_core.rewards.geneval_models import Found, GenEvalReward, ObjectDetector, cut_out
from spotlight_core.types import PromptRow


def _config(detector: Path, classifier: Path, **changes: str) -> GenEvalRewardConfig:
    return GenEvalRewardConfig(
        type="geneval", detector=str(detector), classifier=str(classifier), device="cpu", **changes
    )


@pytest.fixture(scope="module")
def reward(tiny_mask2former: Path, tiny_clip: Path) -> GenEvalReward:
    reward = build_reward(_config(tiny_mask2former, tiny_clip))
    assert isinstance(reward, GenEvalReward)
    return reward


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)


def _expected(folder: Path, image: np.ndarray, inside: tuple[int, int]) -> list[tuple[str, float, list[int]]]:
    """Label, score and box of every object, query by query and class by class."""
    from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil

    model = Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    inputs = Mask2FormerImageProcessorPil.from_pretrained(folder)(images=[image], return_tensors="pt")
    with torch.no_grad():
        answer = model(**inputs)
    height, width = image.shape[:2]
    found = []
    for query in range(model.config.num_queries):
        logits = answer.masks_queries_logits[:, query : query + 1]
        logits = torch.nn.functional.interpolate(logits, inputs["pixel_values"].shape[-2:], mode="bilinear")
        logits = logits[..., : inside[0], : inside[1]]
        mask = torch.nn.functional.interpolate(logits, (height, width), mode="bilinear")[0, 0]
        probabilities = answer.class_queries_logits[0, query].softmax(-1)
        for label in range(80):
            score = float(probabilities[label] * mask[mask > 0].sigmoid().mean()) if (mask > 0).any() else 0.0
            if score > 0.3:
                rows, columns = torch.nonzero(mask > 0, as_tuple=True)
                box = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
                found.append((CLASSES[label], score, box))
    return sorted(found, key=lambda one: -one[1])


def _check_found(found: list[Found], expected: list[tuple[str, float, list[int]]]) -> None:
    ordered = sorted(found, key=lambda one: -one.detection.confidence)
    assert [one.detection.label for one in ordered] == [label for label, _, _ in expected]
    confidences = [score for _, score, _ in expected]
    assert [one.detection.confidence for one in ordered] == pytest.approx(confidences, abs=1e-5)
    assert [list(one.detection.box_xyxy) for one in ordered] == [box for _, _, box in expected]


def test_objects_are_those_of_a_plain_computation(
    tiny_mask2former: Path, reward: GenEvalReward, images: np.ndarray
) -> None:
    for found, image in zip(reward.detector.find(images), images, strict=True):
        expected = _expected(tiny_mask2former, image, inside=(64, 64))
        assert len(expected) >= 2
        _check_found(found, expected)
        for one in found:
            left, top, right, bottom = map(int, one.detection.box_xyxy)
            assert one.mask_HW.shape == (64, 64)
            assert one.mask_HW[top:bottom, left:right].sum() == one.mask_HW.sum() > 0


def test_padding_is_no_part_of_the_image(tiny_mask2former: Path, tmp_path: Path) -> None:
    from transformers import Mask2FormerImageProcessorPil

    folder = tmp_path / "padded"
    shutil.copytree(tiny_mask2former, folder)
    Mask2FormerImageProcessorPil(
        size={"shortest_edge": 48, "longest_edge": 96}, size_divisor=0, pad_size={"height": 64, "width": 96}
    ).save_pretrained(folder)
    image = np.random.default_rng(2).integers(0, 256, (96, 144, 3), dtype=np.uint8)  # to 48 x 72, in 64 x 96
    (found,) = ObjectDetector(str(folder), "cpu").find(image[None])
    expected = _expected(folder, image, inside=(48, 72))
    assert expected
    _check_found(found, expected)


def _all_of(found: list[Found]) -> tuple[str, int]:
    """The commonest class of an image, and how often it is there."""
    return Counter(one.detection.label for one in found).most_common(1)[0]


def test_scores_follow_from_what_is_found(reward: GenEvalReward, images: np.ndarray) -> None:
    label, count = _all_of(reward.detector.find(images)[0])
    there = {"tag": "single_object", "include": [{"class": label, "count": count}]}
    more = {"tag": "single_object", "include": [{"class": label, "count": 2 * count}]}
    both = np.stack([images[0], images[0]])
    rows = [PromptRow(text="", metadata=there), PromptRow(text="", metadata=more)]
    assert reward.score(both, rows) == [1.0, 0.5]


def test_colors_are_looked_at_where_asked(reward: GenEvalReward, images: np.ndarray) -> None:
    found = reward.detector.find(images)[0]
    label, count = _all_of(found)
    objects = [one for one in found if one.detection.label == label]
    colors = Counter(reward.classifier.name_colors(images[0], objects))
    for color in COLORS:
        clause = {"class": label, "count": count, "color": color}
        row = PromptRow(text="", metadata={"tag": "colors", "include": [clause]})
        share = 1 - (count - colors[color]) / count
        assert reward.score(images[:1], [row]) == pytest.approx([(1 + share) / 2])


def test_every_kind_of_score_can_be_chosen(
    tiny_mask2former: Path, tiny_clip: Path, images: np.ndarray
) -> None:
    found = {}
    for kind in ("graded", "strict_correct", "correct", "compat"):
        reward = build_reward(_config(tiny_mask2former, tiny_clip, score=kind))
        assert isinstance(reward, GenEvalReward)
        label, count = _all_of(reward.detector.find(images)[0])
        assert count > 2
        metadata = {"tag": "single_object", "include": [{"class": label, "count": 1}]}
        (found[kind],) = reward.score(images[:1], [PromptRow(text="", metadata=metadata)])
    assert found == {"graded": 0.0, "strict_correct": 0.0, "correct": 1.0, "compat": 2.0 - count}


def test_color_probabilities_are_those_of_a_plain_computation(reward: GenEvalReward, tiny_clip: Path) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    crop = np.random.default_rng(5).integers(0, 256, (40, 24, 3), dtype=np.uint8)
    model = CLIPModel.from_pretrained(tiny_clip).eval()
    tokenizer, pixels = (
        AutoTokenizer.from_pretrained(tiny_clip),
        CLIPImageProcessorPil.from_pretrained(tiny_clip),
    )

    def embedded(text: str) -> torch.Tensor:
        answer = model(**tokenizer([text], return_tensors="pt"), **pixels(images=[crop], return_tensors="pt"))
        return torch.stack([answer.text_embeds[0], answer.image_embeds[0]])

    logits = []
    with torch.no_grad():
        for color in COLORS:
            wordings = (
                f"a picture of one {color} cat",
                f"a cat whose colour is {color}",
                f"a picture of something {color}",
            )
            text, image = torch.stack([embedded(wording) for wording in wordings]).mean(0)
            logits.append(float(model.logit_scale.exp() * (text / text.norm()) @ image))
    expected = torch.tensor(logits).softmax(0).tolist()
    assert reward.classifier.probabilities([crop], "cat")[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_an_object_is_cut_out_on_grey() -> None:
    image = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    mask = np.zeros((4, 5), dtype=bool)
    mask[1, 2] = mask[2, 3] = True
    crop = cut_out(image, mask, (2.0, 1.0, 4.0, 3.0))
    grey = [153, 153, 153]
    assert crop.tolist() == [[image[1, 2].tolist(), grey], [grey, image[2, 3].tolist()]]


def test_detections_and_masks_stay_together(reward: GenEvalReward) -> None:
    """Two equal detections with other masks: each object's colour is its own."""
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, 4:] = 255
    detection = Detection(label="cat", confidence=0.9, box_xyxy=(0.0, 0.0, 8.0, 8.0))
    halves = [np.arange(8)[None].repeat(8, 0) < 4, np.arange(8)[None].repeat(8, 0) >= 4]
    objects = [Found(detection=detection, mask_HW=half) for half in halves]
    alone = [reward.classifier.name_colors(image, [one])[0] for one in objects]
    assert reward.classifier.name_colors(image, objects) == alone


def test_metadata_is_checked_before_anything_is_detected(reward: GenEvalReward, images: np.ndarray) -> None:
    with pytest.raises(BadInputError, match="tag is None"):
        reward.score(images[:1], [PromptRow(text="a photo of a dog")])


def test_a_detector_without_cocos_classes(tiny_mask2former: Path, tiny_clip: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wolves"
    shutil.copytree(tiny_mask2former, folder)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"]["16"] = "wolf"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="does not know 1 of COCO's 80 classes, as 'dog'"):
        build_reward(_config(folder, tiny_clip))
