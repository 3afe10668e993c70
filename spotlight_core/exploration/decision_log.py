"""A recorded run's decisions, followed by another run.

What a live run decides depends on how far exploration came before its deadline, so on time.  Its
decision log is all that carries this into the weights: a run that follows the log trains the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spotlight_core.errors import BadInputError
from spotlight_core.types import Batch, Decision, PlannedPrompt


@dataclass(frozen=True, slots=True)
class DecisionLog:
    """The decision for the batch of each iteration."""

    decisions: Mapping[int, Decision]

    def batch(self, upcoming: Batch) -> tuple[Batch, Decision]:
        """``upcoming`` with the seeds that the log chose.

        Raises:
            BadInputError: the log has no decision for this batch, or one that does not fit it.
        """
        decision = self.decisions.get(upcoming.iteration)
        wanted = {planned.prompt.occurrence: len(planned.seeds) for planned in upcoming.prompts}
        if decision is None or decision.selected.keys() != wanted.keys():
            held = "no decision" if decision is None else "a decision about other prompts"
            raise BadInputError(
                f"the decision log holds {held} for iteration {upcoming.iteration}",
                "replay a run of the same recipe that went as far",
            )
        for occurrence, seeds in decision.selected.items():
            if len(set(seeds)) != wanted[occurrence] or min(seeds) < 0:
                raise BadInputError(
                    f"the decision log chooses the seeds {list(seeds)} for prompt {occurrence} in iteration "
                    f"{upcoming.iteration}, not {wanted[occurrence]} different ones from 0 on",
                    "restore the log, or replay another run",
                )
        prompts = tuple(
            PlannedPrompt(prompt=planned.prompt, seeds=decision.selected[planned.prompt.occurrence])
            for planned in upcoming.prompts
        )
        return Batch(iteration=upcoming.iteration, prompts=prompts), decision


def read_decision_log(path: Path, iterations: int) -> DecisionLog:
    """The log of a run's folder, which must reach ``iterations``.

    Raises:
        BadInputError: no log there, a line that is no decision, or too few of them.
    """
    decisions: dict[int, Decision] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the decision log {path} ({error})", "replay another run") from error
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            decision = _decision(path, number, line)
            decisions[decision.iteration] = decision
    # The first batch has plain seeds, and what is decided after the last is never rolled out.
    missing = [iteration for iteration in range(1, iterations) if iteration not in decisions]
    if missing:
        raise BadInputError(
            f"the decision log {path} has none for iteration {missing[0]} of {iterations}",
            "let that run finish first",
        )
    return DecisionLog(decisions)


def _decision(path: Path, number: int, line: str) -> Decision:
    try:
        record = json.loads(line)
        arm = record["arm"]
        return Decision(
            iteration=int(record["iteration"]),
            arm=None if arm is None else (int(arm[0]), int(arm[1])),
            selected={key: tuple(map(int, seeds)) for key, seeds in record["selected"].items()},
            complete={key: bool(whole) for key, whole in record["complete"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadInputError(
            f"{path}:{number} is no decision ({error!r})", "restore the line, or replay another run"
        ) from error
