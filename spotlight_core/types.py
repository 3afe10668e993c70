"""The nouns of one RL iteration, as they cross boundaries: frozen, keyword-only, JSON-friendly.

Tensors never live here; a result is named by a ``ref`` (where) and a ``digest`` (what).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["rollout", "evaluate", "audit", "explore"]
VersionLabel = Literal["base", "current", "old", "ema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One set of published policy weights.

    ``label`` says which weights these are: ``old`` is the policy that rolls out and explores,
    ``ema`` the one that is evaluated and exported, ``current`` the raw trained weights.
    ``number`` counts published updates; ``digest`` is the sha256 that every node must confirm.
    """

    label: VersionLabel
    number: int
    digest: str

    @property
    def name(self) -> str:
        return f"{self.label}-{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A row of a prompt file: the text, and what a reward wants to know beside it (GenEval's clauses)."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(PromptRow):
    """One occurrence of a prompt: the text may repeat in a run, the occurrence never does."""

    occurrence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How a trajectory is denoised.

    ``denoise_steps`` model steps over the schedule; at the steps in ``reused_steps`` the last
    velocity is reused instead of computed, so the effective steps are the difference.
    ``sde_steps`` is the half-open range of stochastic steps, those that are scored and trained;
    None when every step is an ODE step.
    """

    denoise_steps: int
    reused_steps: tuple[int, ...] = ()
    sde_steps: tuple[int, int] | None = None

    @property
    def effective_steps(self) -> int:
        return self.denoise_steps - len(self.reused_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A fixed micro-batch of trajectories, kept together when committed and resumed.

    Fixed, since a batch of another size differs in the last bits.  ``prompts`` holds the one prompt
    of all rows (rollout, audit, exploration) or one for each seed (evaluation); ValueError otherwise.
    """

    id: str
    kind: Kind
    prompts: tuple[Prompt, ...]
    seeds: tuple[int, ...]
    policy: PolicyVersion
    fidelity: Fidelity

    def __post_init__(self) -> None:
        if not self.seeds or len(self.prompts) not in (1, len(self.seeds)):
            raise ValueError(f"{self.id}: {len(self.prompts)} prompts for {len(self.seeds)} seeds")

    @property
    def prompt(self) -> Prompt:
        """The prompt of the first row; of all rows unless this is an evaluation."""
        return self.prompts[0]

    @property
    def row_prompts(self) -> tuple[Prompt, ...]:
        """The prompt of each row, in the order of ``seeds``."""
        return self.prompts if len(self.prompts) == len(self.seeds) else self.prompts * len(self.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedScore:
    """The reward of one seed of one prompt."""

    seed: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The K scored trajectories of one prompt occurrence: the unit of advantage.

    ``request_id`` names the result that holds the latents, rows in the order of ``seeds``;
    ``sde_steps`` are its trained denoise steps.  With several rewards, ``rewards`` holds their weighted
    sum and ``parts`` the scores of each by name.
    """

    prompt: Prompt
    seeds: tuple[int, ...]
    rewards: tuple[float, ...]
    request_id: str
    explored: bool
    sde_steps: tuple[int, int] | None = None
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrompt:
    """A prompt of a batch with the seeds to roll out and, if it was explored, what exploration saw."""

    prompt: Prompt
    seeds: tuple[int, ...]
    explored: tuple[SeedScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one iteration rolls out.  ``audit_occurrence`` names the prompt rolled out on all its seeds."""

    iteration: int
    prompts: tuple[PlannedPrompt, ...]
    audit_occurrence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One line of the decision log: all that may depend on time or rewards in an iteration.

    Given the same decisions, trained weights are the same under any preemption schedule.
    """

    iteration: int
    arm: tuple[int, int] | None
    selected: dict[str, tuple[int, ...]]
    complete: dict[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What the loop carries from one iteration to the next (weights live in the trainer's state)."""

    iteration: int
    policy: PolicyVersion
    batch: Batch
    sampler_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of one policy version on held-out prompts."""

    policy: PolicyVersion
    images: int
    score: float
    held_out: float
    grey_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """What one iteration did.  ``metrics`` use the tracked names (``train/reward_mean``...)."""

    iteration: int
    state: RunState
    decision: Decision
    evaluation: Evaluation | None
    metrics: dict[str, float] = field(default_factory=dict)
