"""The scorer process: reads requests from stdin, answers on stdout, one JSON line each.

    first line out   {"ready": true}  or  {"error", "remedy", "kind"} after a failed self-test
    request          {"which", "prompts", "shape"} newline, then the uint8 pixels
    answer           {"scores": [...], "parts": {name: [...]}}  or  {"error": ..., "final": ...}

"final" says that asking again is of no use: the reward has made its own attempts, or the prompt is at fault.

It ends with its input: a run that dies, however, closes the pipe.
"""

import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from spotlight_core.child_process import Answers, told
from spotlight_core.config import RewardConfig
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.rewards.base import Reward, ScorerGaveUp, build_reward
from spotlight_core.rewards.scoring import score_request
from spotlight_core.rewards.selftest import self_test
from spotlight_core.types import PromptRow


def main() -> None:
    """Serve until stdin closes."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    answers = Answers()
    try:
        rewards = _build(sys.argv[1])
    except SpotlightError as error:
        answers.give(told(error))
        return
    answers.give({"ready": True})
    requests = answers.requests
    while line := requests.readline():
        header = json.loads(line)
        pixels = requests.read(int(np.prod(header["shape"])))
        images = np.frombuffer(pixels, dtype=np.uint8).reshape(header["shape"])
        rows = [PromptRow(**row) for row in header["prompts"]]
        answers.give(_scored(rewards[header["which"]], images, rows))


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
        return {"error": f"{type(error).__name__}: {error}{_place(error)}", "final": final}
    return {"scores": scored.scores, "parts": dict(scored.parts)}


def _place(error: Exception) -> str:
    """Where an error that is not ours was raised: a bare KeyError in a user's reward says nothing else."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SpotlightError) or not frames:
        return ""
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}"


if __name__ == "__main__":
    main()
