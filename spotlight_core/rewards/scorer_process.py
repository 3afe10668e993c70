"""The scorer process: reads requests from stdin, answers on stdout, one JSON line each.

    first line out   {"ready": true}  or  {"error", "remedy", "kind"} after a failed self-test
    request          {"which", "prompts", "shape"} newline, then the uint8 pixels
    answer           {"scores": [...], "parts": {name: [...]}}  or  {"error": ..., "final": ...}

"final" says that asking again is of no use: the reward has made its own attempts, or the prompt is at fault.

It ends with its input: a run that dies, however, closes the pipe.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

import numpy as np
from pydantic import TypeAdapter

from spotlight_core.config import RewardConfig
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.rewards.base import Reward, ScorerGaveUp, build_reward
from spotlight_core.rewards.scoring import score_request
from spotlight_core.rewards.selftest import self_test
from spotlight_core.types import PromptRow

PARENT_CHECK_SECONDS = 1.0


def main() -> None:
    """Serve until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    _end_with_parent(os.getppid())
    # A reward's own prints must not land among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        rewards = _build(sys.argv[1])
    except SpotlightError as error:
        _answer(answers, {"error": error.problem, "remedy": error.remedy, "kind": type(error).__name__})
        return
    _answer(answers, {"ready": True})
    requests = sys.stdin.buffer
    while line := requests.readline():
        header = json.loads(line)
        pixels = requests.read(int(np.prod(header["shape"])))
        images = np.frombuffer(pixels, dtype=np.uint8).reshape(header["shape"])
        rows = [PromptRow(**row) for row in header["prompts"]]
        _answer(answers, _scored(rewards[header["which"]], images, rows))


def _build(recipe: str) -> dict[str, Reward]:
    adapter: TypeAdapter[RewardConfig] = TypeAdapter(RewardConfig)
    rewards = {
        which: build_reward(adapter.validate_python(tree)) for which, tree in json.loads(recipe).items()
    }
    for reward in rewards.values():
        self_test(reward)
    return rewards


def _scored(reward: Reward, images: np.ndarray, prompts: list[PromptRow]) -> dict[str, Any]:
    try:
        scored = score_request(reward, images, prompts)
    except Exception as error:  # the parent retries, then names the scorer
        final = isinstance(error, ScorerGaveUp | BadInputError)
        return {"error": f"{type(error).__name__}: {error}", "final": final}
    return {"scores": scored.scores, "parts": dict(scored.parts)}


def _answer(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _end_with_parent(parent: int) -> None:
    """Leave when the parent is gone: a sibling that inherited the pipe could hold it open."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
