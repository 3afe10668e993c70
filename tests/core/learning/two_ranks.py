"""What one rank, or one process alone, does in the tests of sharding.

    python -m tests.core.learning.two_ranks RANK RANKS FOLDER SCENARIO...

Runs the scenarios; writes its gradients after the first iteration, its weights after the last and its
metrics into the folder.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from spotlight_core.config import RunConfig
from spotlight_core.diffusion.policy import policy_parameters
from spotlight_core.learning.sharding import Ranks
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.learning.updates import TrainingGroup
from tests.core.learning.scenarios import (
    GRPO,
    GUARD,
    LORA,
    NFT,
    config,
    small_groups,
    small_model,
    spoilt,
    with_optimizer,
)

Groups = list[TrainingGroup]

ONE_UPDATE = {"lr": 1e-3, "updates_per_iteration": 1, "samples_per_forward": 4}
BF16 = {"training_dtype": "bf16", "rollout_dtype": "bf16"}
SCENARIOS: dict[str, tuple[RunConfig, Callable[[RunConfig], Groups]]] = {
    "nft": (config(NFT), small_groups),
    "nft_lora": (config(NFT | LORA), small_groups),
    "grpo_lora": (config(GRPO | LORA), small_groups),
    "guard": (config(GUARD), small_groups),
    # One update of 12 rows that teach, cut in threes: an odd number of chunks, one of them a single row.
    "constant": (
        with_optimizer(NFT | LORA, updates_per_iteration=1, samples_per_forward=5),
        lambda recipe: small_groups(recipe, 4, constant=(1,)),
    ),
    "all_constant": (config(NFT | LORA), lambda recipe: small_groups(recipe, constant=(0, 1, 2))),
    "not_finite": (
        with_optimizer(GRPO | LORA, updates_per_iteration=1),
        lambda recipe: spoilt(small_groups(recipe), 2),
    ),
    # The rollout was another policy's, so every rank computes its chunks' anchors again.
    "recomputed": (
        with_optimizer(GRPO, updates_per_iteration=1, samples_per_forward=6),
        lambda recipe: small_groups(recipe, model=small_model(recipe, seed=1)),
    ),
    "ceiling": (
        with_optimizer(NFT, kl_ceiling=1e-30),
        small_groups,
    ),
    "guided": (config(NFT, name="guided"), small_groups),
    "guided_lora": (config(GRPO | LORA, name="guided"), small_groups),
    # A frozen base in bf16 and trained adapters in fp32; all weights trained under autocast.
    "lora_bf16": (config(NFT | LORA, model=LORA["model"] | BF16), small_groups),
    "bf16": (config(NFT, model={"type": "tiny"} | BF16, optimizer=ONE_UPDATE), small_groups),
    "checkpointed": (
        config(NFT | LORA, trainer={"gradient_checkpointing": True, "ranks": 2}),
        small_groups,
    ),
}
ITERATIONS = 2
FAST = ("nft", "nft_lora", "grpo_lora", "guard", "constant", "not_finite")
SLOW = tuple(name for name in SCENARIOS if name not in FAST)
SAVED = ("nft", "grpo_lora")  # scenarios that also write a checkpoint
DONE = "done"  # written by one process alone, when its checkpoints can be read


def run_all(folder: Path, ranks: Ranks, names: Sequence[str]) -> None:
    """These scenarios on these ranks; see the module's text."""
    for name in names:
        recipe, groups = SCENARIOS[name]
        _run(name, recipe, groups(recipe), folder, ranks)


def _run(name: str, recipe: RunConfig, groups: Groups, folder: Path, ranks: Ranks) -> None:
    trainer = PolicyTrainer(small_model(recipe), recipe, ranks)
    metrics = [trainer.train(groups, 0)]
    tensors = ranks.full({f"grad.{name}": grad for name, grad in gradients(trainer).items()})
    metrics += [trainer.train(groups, iteration) for iteration in range(1, ITERATIONS)]
    (folder / f"{name}-{ranks.rank}.json").write_text(json.dumps(metrics))
    tensors |= _whole(trainer)
    if ranks.rank == 0:
        save_file(tensors, folder / f"{name}.safetensors")
    if name in SAVED:
        trainer.save(folder / f"{name}-state")


def gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Those of the last update, where there are any."""
    parameters = policy_parameters(trainer.model.transformer)
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


def _resave(name: str, folder: Path, ranks: Ranks) -> None:
    """Read what one process alone saved, and write it from these ranks."""
    recipe, _ = SCENARIOS[name]
    trainer = PolicyTrainer(small_model(recipe, seed=5), recipe, ranks)
    trainer.load(folder.parent / "one" / f"{name}-state")
    trainer.save(folder / f"{name}-resaved")


def _whole(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    weights = {
        "raw": trainer.trained_weights(),
        "old": trainer.rollout_weights(),
        "ema": trainer.ema_weights(),
    }
    return {f"{kind}.{name}": tensor for kind, part in weights.items() for name, tensor in part.items()}


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ranks = Ranks.joined(rank=rank, size=size, device_type="cpu", meeting=folder / "meeting")
    names = sys.argv[4:]
    run_all(folder, ranks, names)
    deadline = time.monotonic() + 120.0
    while not (folder.parent / "one" / DONE).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for name in set(SAVED) & set(names):
        _resave(name, folder, ranks)
    ranks.leave()
    os._exit(0)  # what the collectives' threads do while an interpreter ends is not what is tested


if __name__ == "__main__":
    main()
