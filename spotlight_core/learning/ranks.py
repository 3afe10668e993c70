"""The live run's trainer: in this process, or sharded over several of its own.

    train, save, ... ──► one JSON line to each rank ──► rank_process ──► PolicyTrainer over its shards
                    ◄── one JSON line from each

Rollouts and weights travel as safetensors files in a scratch folder, so nothing is unpickled.  Ranks
act in step or not at all: when one ends, the others are ended too.
"""

import contextlib
import json
import logging
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from spotlight_core.child_process import child_environment
from spotlight_core.config import RunConfig
from spotlight_core.diffusion.models import build_model
from spotlight_core.errors import BadInputError, TrainingError
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.learning.updates import TrainingGroup

LOG = logging.getLogger(__name__)
CLOSE_SECONDS = 5.0
ERROR_SECONDS = 20.0  # after one rank's error, for the others to come to the same
SETTLE_SECONDS = 0.5  # after a rank's end, before deciding which one ended first

Answer = dict[str, Any]


class Trainer(Protocol):
    """What a run asks of its trainer: see ``PolicyTrainer``."""

    @property
    def rollout_label(self) -> Literal["old", "current"]: ...

    def train(self, groups: Sequence[TrainingGroup], iteration: int) -> dict[str, float]: ...

    def trained_weights(self) -> dict[str, torch.Tensor]: ...

    def rollout_weights(self) -> dict[str, torch.Tensor]: ...

    def ema_weights(self) -> dict[str, torch.Tensor]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def close(self) -> None: ...


def build_trainer(config: RunConfig, scratch: Path) -> Trainer:
    """The recipe's trainer; with several ranks their processes are started and load meanwhile.

    ``scratch`` is a folder for their files: emptied first, gone when they end.

    Raises:
        BadInputError: the model cannot be built.
    """
    if config.trainer.ranks > 1:
        return TrainerRanks(config, scratch)
    checkpointing = config.trainer.gradient_checkpointing
    return PolicyTrainer(build_model(config.model, "training", gradient_checkpointing=checkpointing), config)


class TrainerRanks:
    """One process for each of ``trainer.ranks``.  Used by one thread at a time (``_lock``)."""

    def __init__(self, config: RunConfig, scratch: Path) -> None:
        """See ``build_trainer``."""
        self._scratch = scratch.absolute()
        shutil.rmtree(self._scratch, ignore_errors=True)  # of a run that was killed
        self._scratch.mkdir(parents=True)
        (self._scratch / "recipe.json").write_text(config.model_dump_json(), encoding="utf-8")
        self._lock = threading.Lock()
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._failure: TrainingError | None = None
        self._label: Literal["old", "current"] | None = None
        self._children = [
            _Child(rank, config, self._scratch, self._lines) for rank in range(config.trainer.ranks)
        ]

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [child.process.pid for child in self._children]

    @property
    def rollout_label(self) -> Literal["old", "current"]:
        self.check()
        assert self._label is not None
        return self._label

    def check(self) -> None:
        """Wait until every rank has its model.

        Raises:
            BadInputError: the recipe's model cannot be built.
            TrainingError: a rank has ended.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._label is None:
                self._label = self._answer()["label"]

    def train(self, groups: Sequence[TrainingGroup], iteration: int) -> dict[str, float]:
        self.check()
        path = self._scratch / "groups.safetensors"
        write_groups(groups, path)
        return self._ask({"do": "train", "groups": str(path), "iteration": iteration})["metrics"]

    def trained_weights(self) -> dict[str, torch.Tensor]:
        return self._weights("trained")

    def rollout_weights(self) -> dict[str, torch.Tensor]:
        return self._weights("rollout")

    def ema_weights(self) -> dict[str, torch.Tensor]:
        return self._weights("ema")

    def save(self, folder: Path) -> None:
        self._ask({"do": "save", "folder": str(folder)})

    def load(self, folder: Path) -> None:
        self._ask({"do": "load", "folder": str(folder)})

    def close(self) -> None:
        """End the processes.  Safe to call twice."""
        self._failure = self._failure or TrainingError("the trainer is closed", "train before the run ends")
        for child in self._children:
            child.end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _weights(self, which: str) -> dict[str, torch.Tensor]:
        path = self._scratch / f"{which}.safetensors"
        self._ask({"do": "weights", "which": which, "file": str(path)})
        weights = load_file(path)
        path.unlink()
        return weights

    def _ask(self, message: Mapping[str, Any]) -> Answer:
        """Have every rank do the same; the first rank's answer."""
        self.check()
        with self._lock:
            for child in self._children:
                child.tell(json.dumps(message))
            return self._answer()

    def _answer(self) -> Answer:
        """One line of each rank; the first rank's, or the first error."""
        answers: dict[int, Answer] = {}
        wrong: Answer | None = None
        while len(answers) < len(self._children):
            try:
                rank, line = self._lines.get(timeout=None if wrong is None else ERROR_SECONDS)
            except queue.Empty:  # an error of one rank alone: the others wait for it in a collective
                self.close()
                break
            if line is None:
                self._failure = self._ended(rank)
                self.close()
                raise self._failure
            answers[rank] = json.loads(line)
            wrong = wrong or (answers[rank] if "error" in answers[rank] else None)
        if wrong is not None:
            kind = BadInputError if wrong["kind"] == "BadInputError" else TrainingError
            raise kind(wrong["error"], wrong["remedy"])
        return answers[0]

    def _ended(self, rank: int) -> TrainingError:
        """Which rank ended, and how: the others follow soon, of a collective that they lost it in."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._children[rank].process.wait(SETTLE_SECONDS)
        codes = {child.rank: child.process.poll() for child in self._children}
        signalled = [other for other, code in codes.items() if code is not None and code < 0]
        culprit = signalled[0] if signalled else rank
        code, which = codes[culprit], f"trainer rank {culprit} of {len(codes)}"
        if code is not None and code < 0:
            problem = f"{which} was ended by signal {-code}"
        else:
            how = "stopped answering" if code is None else f"ended with exit code {code}"
            problem = f"{which} {how} ({self._children[culprit].last_line()})"
        return TrainingError(problem, "see the run's log, and continue with --resume")


class _Child:
    """The process of one rank; its lines and its end come into ``lines``."""

    def __init__(
        self, rank: int, config: RunConfig, scratch: Path, lines: "queue.Queue[tuple[int, str | None]]"
    ) -> None:
        self.rank = rank
        self._lines = lines
        self._said = "it said nothing"
        env = child_environment(config.services.torch_threads)
        if config.trainer.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        size = str(config.trainer.ranks)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spotlight_core.learning.rank_process", str(rank), size, str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",  # what a library prints must not end its rank
            env=env,
            process_group=0,  # a Ctrl-C at the terminal is the run's to handle
        )
        self._readers = [
            threading.Thread(target=read, name=f"trainer-rank-{rank}", daemon=True)
            for read in (self._read_answers, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: its reader says so
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def last_line(self) -> str:
        """The last thing that it wrote to stderr."""
        self._readers[1].join(SETTLE_SECONDS)
        return self._said

    def end(self) -> None:
        """Close its input, which ends it, and kill it when it does not listen."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(CLOSE_SECONDS)

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as answers:
            for line in answers:
                self._lines.put((self.rank, line))
        self._lines.put((self.rank, None))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as errors:
            for line in errors:
                if line.strip():
                    self._said = line.strip()
                    LOG.warning("trainer rank %d: %s", self.rank, line.rstrip())


# -- groups as files --------------------------------------------------------------------------------


def write_groups(groups: Sequence[TrainingGroup], path: Path) -> None:
    """One safetensors file; what is no array is JSON in its header."""
    arrays: dict[str, np.ndarray] = {}
    about = []
    for number, group in enumerate(groups):
        arrays[f"{number}.rewards"] = group.rewards
        arrays |= {f"{number}.parts.{name}": scores for name, scores in group.parts.items()}
        arrays |= {f"{number}.arrays.{name}": array for name, array in group.arrays.items()}
        names = {"parts": list(group.parts), "arrays": list(group.arrays)}
        about.append({"prompt": group.prompt, "sde_steps": group.sde_steps, **names})
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(whole, path, metadata={"groups": json.dumps(about)})


def read_groups(path: Path) -> list[TrainingGroup]:
    """What ``write_groups`` wrote, to the bit."""
    with safe_open(path, framework="np") as file:
        return [
            TrainingGroup(
                prompt=one["prompt"],
                sde_steps=None if one["sde_steps"] is None else tuple(one["sde_steps"]),
                rewards=file.get_tensor(f"{number}.rewards"),
                parts={name: file.get_tensor(f"{number}.parts.{name}") for name in one["parts"]},
                arrays={name: file.get_tensor(f"{number}.arrays.{name}") for name in one["arrays"]},
            )
            for number, one in enumerate(json.loads(file.metadata()["groups"]))
        ]
