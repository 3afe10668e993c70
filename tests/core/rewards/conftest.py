"""Tiny random scoring models in folders of Hugging Face's layout, loaded as the real ones are."""

from pathlib import Path

import pytest
import torch

TEXT = (
    "a picture of one thing whose colour is something photo red orange yellow green blue purple pink "
    "brown black white dog cat car stop sign horse on grass"
)


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of one layer, its word tokenizer and its image processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_clip")
    special = ["<pad>", "<start>", "<unk>", "<end>"]
    vocabulary = {word: index for index, word in enumerate([*special, *TEXT.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<start>",
        eos_token="<end>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        folder
    )
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 12}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    torch.manual_seed(1)
    config = CLIPConfig(
        text_config=tower | text | ends,
        vision_config=tower | {"image_size": 32, "patch_size": 8},
        projection_dim=8,
    )
    model = CLIPModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # as drawn by transformers, a text's words would hardly change it
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_mask2former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mask2Former with COCO's 80 classes, some in the detectors' own spelling, that is sure of itself."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessorPil,
        SwinConfig,
    )

    from spotlight_core.rewards.geneval_metadata import CLASSES, OTHER_SPELLINGS

    folder = tmp_path_factory.mktemp("tiny_mask2former")
    theirs = {ours: other for other, ours in OTHER_SPELLINGS.items()}
    backbone = SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    torch.manual_seed(0)
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        dim_feedforward=16,
        num_attention_heads=2,
        num_queries=12,
        id2label={index: theirs.get(name, name) for index, name in enumerate(CLASSES)},
    )
    model = Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        model.class_predictor.weight *= 40.0  # at random every class has a probability of 1/81
        model.class_predictor.bias[-1] = 12.0  # and some queries see nothing
    model.save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder
