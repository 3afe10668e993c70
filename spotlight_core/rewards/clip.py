"""CLIP's two towers (arXiv 2103.00020), as the rewards that compare images with words share them.

Shape legend: B batch, D embedding.
"""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, CLIPModel

from spotlight_core.errors import BadInputError
from spotlight_core.rewards.pretrained import load_model, opened, scoring_device


class ClipTowers:
    """A CLIP with its processors, in fp32.  ``logit_scale`` is already taken out of its logarithm."""

    def __init__(self, path: str, processor: str, device: str) -> None:
        """Load the model at ``path``, and the tokenizer and image processor at ``processor``.

        Raises:
            BadInputError: one of them cannot be loaded, or is no CLIP; no such device.
        """
        self._device = scoring_device(device)
        self._model = load_model(AutoModel, path, self._device)
        if not isinstance(self._model, CLIPModel):
            raise BadInputError(f"{path} is a {type(self._model).__name__}", "name a CLIP model")
        self._tokenizer = opened(processor, lambda: AutoTokenizer.from_pretrained(processor))
        # The PIL backend: the torchvision one resizes otherwise, and is not installed everywhere.
        self._pixels = opened(processor, lambda: AutoImageProcessor.from_pretrained(processor, backend="pil"))
        self.logit_scale = float(self._model.logit_scale.exp())

    @torch.inference_mode()
    def images(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        """Unit vectors fp32 ``[B, D]`` on the CPU, of uint8 images ``[height, width, 3]`` of any sizes."""
        pictures = [Image.fromarray(image) for image in images]
        pixels = self._pixels(images=pictures, return_tensors="pt")["pixel_values"].to(self._device)
        return _unit(self._model.get_image_features(pixel_values=pixels).pooler_output)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Unit vectors fp32 ``[B, D]`` on the CPU; a text longer than CLIP's context is cut."""
        tokens = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self._model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self._device)
        return _unit(
            self._model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            ).pooler_output
        )

    def cosines(self, images: np.ndarray, texts: Sequence[str]) -> list[float]:
        """The cosine of each image (uint8 ``[B, height, width, 3]``) and its text."""
        return (self.images(list(images)) * self.texts(texts)).sum(dim=-1).tolist()


def _unit(vectors_BD: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors_BD.float(), dim=-1).cpu()
