"""One rank of a sharded trainer: does what stdin says, answers on stdout, one JSON line each.

    first line out   {"label"}  or  {"error", "remedy", "kind"} when the model cannot be built
    request          {"do": "train" | "weights" | "save" | "load", ...}, the same to every rank
    answer           {"metrics"} or {}  or  {"error", "remedy", "kind"}

An error of our own is answered, by every rank when all have it at the same place.  Any other ends the
process, since the ranks are no longer in step.  It ends with its input, and with its parent.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spotlight_core.child_process import Answers, told
from spotlight_core.config import RunConfig
from spotlight_core.diffusion.models import build_model
from spotlight_core.errors import SpotlightError, TrainingError
from spotlight_core.learning.ranks import read_groups
from spotlight_core.learning.sharding import Ranks
from spotlight_core.learning.trainer import PolicyTrainer


def main() -> None:
    """Serve until stdin closes; arguments are rank, number of ranks and the scratch folder."""
    answers = Answers()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rank, size, scratch = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    try:
        trainer = _build(rank, size, scratch)
    except SpotlightError as error:
        answers.give(told(error))
        answers.requests.read()  # the parent waits for every rank's answer before it closes them
        return
    answers.give({"label": trainer.rollout_label})
    for line in answers.requests:
        try:
            answer = _done(trainer, json.loads(line))
        except SpotlightError as error:
            answer = told(error)
        except OSError as error:  # a full or damaged disk: the other ranks meet it too, or are ended
            problem = f"rank {rank}: {error.strerror or error} ({error.filename or 'no file named'})"
            answer = told(TrainingError(problem, "mend it and continue with --resume"))
        answers.give(answer)
    os._exit(0)  # at once: an orderly end would wait for ranks that may be gone, and there is nothing to keep


def _build(rank: int, size: int, scratch: Path) -> PolicyTrainer:
    config = RunConfig.model_validate_json((scratch / "recipe.json").read_text(encoding="utf-8"))
    torch.set_num_threads(config.services.torch_threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    checkpointing = config.trainer.gradient_checkpointing
    model = build_model(config.model, "training", gradient_checkpointing=checkpointing)
    device = next(model.transformer.parameters()).device
    ranks = Ranks.joined(rank=rank, size=size, device_type=device.type, meeting=scratch / "meeting")
    return PolicyTrainer(model, config, ranks)


def _done(trainer: PolicyTrainer, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "train":
        groups = read_groups(Path(request["groups"]))
        return {"metrics": trainer.train(groups, request["iteration"])}
    if request["do"] == "save":
        trainer.save(Path(request["folder"]))
    elif request["do"] == "load":
        trainer.load(Path(request["folder"]))
    else:
        which = {
            "trained": trainer.trained_weights,
            "rollout": trainer.rollout_weights,
            "ema": trainer.ema_weights,
        }
        weights = which[request["which"]]()
        if trainer.ranks.rank == 0:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, request["file"])
    return {}


if __name__ == "__main__":
    main()
