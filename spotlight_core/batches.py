"""From prompts to requests, from results to groups: what every implementation of the phases shares.

All of it is a function of the recipe and of what is passed in, so the live phases and the simulated
ones submit the very same requests and take the very same decisions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spotlight_core.config import BanditConfig, FixedArmConfig, NoExplorationConfig, RunConfig
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.diffusion.caching.files import read_table
from spotlight_core.diffusion.caching.table import StepTable
from spotlight_core.errors import BadInputError
from spotlight_core.exploration.arms import Arm
from spotlight_core.exploration.decision_log import DecisionLog
from spotlight_core.exploration.fidelity import reused_steps
from spotlight_core.exploration.planner import ExplorationPlanner, Supply, build_planner
from spotlight_core.exploration.selection import select_seeds
from spotlight_core.types import (
    Batch,
    Decision,
    Fidelity,
    GenerationRequest,
    Kind,
    PlannedPrompt,
    PolicyVersion,
    Prompt,
    PromptRow,
    RunState,
    SeedScore,
    TrajectoryGroup,
)
from spotlight_core.windows import sde_window

Scores = Mapping[str, Sequence[float]]  # request id -> reward of each of its seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanner:
    """The recipe's answers to: which prompts, which requests, which seeds.

    With a ``log`` of another run's decisions, seeds are those of the log and nothing is explored.
    """

    config: RunConfig
    sampler: GroupSampler
    log: DecisionLog | None = None
    explorer: ExplorationPlanner = field(init=False, repr=False)
    steps: StepTable | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "explorer", build_planner(self.config))
        object.__setattr__(self, "steps", _step_table(self.config))

    # -- requests -----------------------------------------------------------------------------------

    def _request(
        self,
        iteration: int,
        kind: Kind,
        prompt: Prompt,
        seeds: Sequence[int],
        policy: PolicyVersion,
        fidelity: Fidelity,
    ) -> GenerationRequest:
        return GenerationRequest(
            id=f"{iteration}/{kind}/{prompt.occurrence}/{seeds[0]}",
            kind=kind,
            prompts=(prompt,),
            seeds=tuple(seeds),
            policy=policy,
            fidelity=fidelity,
        )

    def fidelity(self, iteration: int, prompt: Prompt, reused: tuple[int, ...] = ()) -> Fidelity:
        """The rollout's fidelity; with ``reused`` denoise steps a preview of it, on the same window."""
        sampler = self.config.sampler
        return Fidelity(
            denoise_steps=sampler.denoise_steps,
            reused_steps=reused,
            sde_steps=sde_window(sampler, self.config.rng_seed, iteration, prompt.occurrence),
        )

    def rollout(self, batch: Batch, policy: PolicyVersion) -> tuple[GenerationRequest, ...]:
        """One request per prompt; the audited prompt's other explored seeds come as audit requests."""
        requests = [
            self._request(
                batch.iteration,
                "rollout",
                planned.prompt,
                planned.seeds,
                policy,
                self.fidelity(batch.iteration, planned.prompt),
            )
            for planned in batch.prompts
        ]
        for planned in batch.prompts:
            if planned.prompt.occurrence == batch.audit_occurrence:
                rest = [score.seed for score in planned.explored if score.seed not in planned.seeds]
                fidelity = self.fidelity(batch.iteration, planned.prompt)
                requests += [
                    self._request(batch.iteration, "audit", planned.prompt, part, policy, fidelity)
                    for part in _parts(rest, self.config.data.seeds_per_prompt)
                ]
        return tuple(requests)

    def explore(
        self, upcoming: Batch, policy: PolicyVersion, supply: Supply | None = None
    ) -> tuple[GenerationRequest, ...]:
        """Candidate seeds of all prompts but the unexplored ones, in micro-batches; how many is decided here.

        None for a batch that comes after the run's last iteration.  ``supply``: what may be counted on.
        """
        config = self.config.exploration
        if upcoming.iteration >= self.config.iterations or self.log is not None:
            return ()
        if isinstance(config, NoExplorationConfig):
            return ()
        explored = upcoming.prompts[: len(upcoming.prompts) - config.unexplored_prompts]
        arm = self.explorer.decide(upcoming.iteration, len(explored), supply)
        if arm is None:
            return ()
        reused = self._reused_steps(arm.effective_steps)
        return tuple(
            self._request(
                upcoming.iteration,
                "explore",
                planned.prompt,
                part,
                policy,
                self.fidelity(upcoming.iteration, planned.prompt, reused),
            )
            for planned in explored
            for part in _parts(range(arm.seeds_per_prompt), config.seeds_per_request)
        )

    def _reused_steps(self, effective_steps: int) -> tuple[int, ...]:
        if self.steps is not None:
            return self.steps.reused_steps(effective_steps)
        return reused_steps(self.config.sampler.denoise_steps, effective_steps)

    def evaluate(
        self, prompts: Sequence[PromptRow], policy: PolicyVersion, iteration: int
    ) -> tuple[GenerationRequest, ...]:
        """One image per held-out prompt, always from the same noise, by ODE steps."""
        steps = self.config.evaluation.denoise_steps or self.config.sampler.denoise_steps
        fidelity = Fidelity(denoise_steps=steps)
        occurrences = [
            Prompt(occurrence=f"held-out-{index}", text=row.text, metadata=row.metadata)
            for index, row in enumerate(prompts)
        ]
        size = self.config.evaluation.images_per_request
        return tuple(
            GenerationRequest(
                id=f"{iteration}/evaluate/{start}",
                kind="evaluate",
                prompts=tuple(occurrences[start : start + size]),
                seeds=(0,) * len(occurrences[start : start + size]),
                policy=policy,
                fidelity=fidelity,
            )
            for start in range(0, len(occurrences), size)
        )

    # -- decisions ----------------------------------------------------------------------------------

    @property
    def explores_beside_training(self) -> bool:
        exploration = self.config.exploration
        return isinstance(exploration, NoExplorationConfig) or exploration.when == "beside_training"

    def arm(self, iteration: int) -> Arm | None:
        """What was decided for the batch of an iteration."""
        return self.explorer.arm(iteration)

    def plain(self, iteration: int, position: int) -> Batch:
        """The batch at ``position`` with the first K seeds of each prompt."""
        data = self.config.data
        seeds = tuple(range(data.seeds_per_prompt))
        return Batch(
            iteration=iteration,
            prompts=tuple(
                PlannedPrompt(prompt=prompt, seeds=seeds)
                for prompt in self.sampler.batch(position, data.prompts_per_iteration)
            ),
        )

    def upcoming(self, state: RunState) -> Batch:
        """The batch after ``state``'s, before any seed is selected."""
        return self.plain(state.iteration + 1, state.sampler_position + len(state.batch.prompts))

    def select(self, upcoming: Batch, explored: Mapping[str, Sequence[SeedScore]]) -> tuple[Batch, Decision]:
        """Best and worst explored seeds of each prompt; the decision is what the log keeps."""
        if self.log is not None and upcoming.iteration < self.config.iterations:
            return self.log.batch(upcoming)
        config, arm = self.config.exploration, self.arm(upcoming.iteration)
        prompts = tuple(self._planned(planned, explored) for planned in upcoming.prompts)
        audit = None
        if not isinstance(config, NoExplorationConfig) and config.audit_every:
            complete = [p for p in prompts if arm and len(p.explored) == arm.seeds_per_prompt]
            if complete and upcoming.iteration % config.audit_every == 0:
                audit = complete[0].prompt.occurrence
        batch = Batch(iteration=upcoming.iteration, prompts=prompts, audit_occurrence=audit)
        decision = Decision(
            iteration=upcoming.iteration,
            arm=(arm.seeds_per_prompt, arm.effective_steps) if arm else None,
            selected={p.prompt.occurrence: p.seeds for p in prompts},
            complete={
                p.prompt.occurrence: arm is not None and len(p.explored) == arm.seeds_per_prompt
                for p in prompts
            },
        )
        return batch, decision

    def _planned(self, planned: PlannedPrompt, explored: Mapping[str, Sequence[SeedScore]]) -> PlannedPrompt:
        scores = tuple(sorted(explored.get(planned.prompt.occurrence, ()), key=lambda score: score.seed))
        if not scores:
            return planned
        config = self.config.exploration
        assert isinstance(config, FixedArmConfig | BanditConfig)
        key = ("selection", self.config.rng_seed, planned.prompt.occurrence)
        seeds = select_seeds(config.selection, scores, self.config.data.seeds_per_prompt, key)
        return PlannedPrompt(prompt=planned.prompt, seeds=seeds, explored=scores)


def _step_table(config: RunConfig) -> StepTable | None:
    """The recipe's table of steps.

    Raises:
        BadInputError: it cannot be read, or is of another number of denoise steps.
    """
    exploration, denoise_steps = config.exploration, config.sampler.denoise_steps
    if isinstance(exploration, NoExplorationConfig) or exploration.steps is None:
        return None
    table = read_table(exploration.steps)
    if table.denoise_steps != denoise_steps:
        raise BadInputError(
            f"{exploration.steps} is of {table.denoise_steps} denoise steps, and sampler.denoise_steps = "
            f"{denoise_steps}",
            "calibrate again with this recipe: spotlight calibrate RECIPE",
        )
    return table


def _parts(seeds: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(seeds), size):
        yield seeds[start : start + size]


def explored_scores(
    requests: Sequence[GenerationRequest], scores: Scores
) -> dict[str, tuple[SeedScore, ...]]:
    """What exploration saw of each prompt occurrence, from the requests that were scored."""
    result: dict[str, list[SeedScore]] = {}
    for request in requests:
        for seed, reward in zip(request.seeds, scores.get(request.id, ()), strict=False):
            result.setdefault(request.prompt.occurrence, []).append(SeedScore(seed=seed, reward=reward))
    return {occurrence: tuple(seeds) for occurrence, seeds in result.items()}


def trajectory_groups(
    batch: Batch,
    requests: Sequence[GenerationRequest],
    scores: Scores,
    parts: Mapping[str, Scores] | None = None,
) -> tuple[TrajectoryGroup, ...]:
    """The scored group of each prompt, in the batch's order whatever the order of arrival.

    ``parts`` holds the scores of each of several rewards by its name.
    """
    rollouts = {request.prompt.occurrence: request for request in requests if request.kind == "rollout"}
    return tuple(
        _group(planned, rollouts[planned.prompt.occurrence], scores, parts or {}) for planned in batch.prompts
    )


def _group(
    planned: PlannedPrompt, request: GenerationRequest, scores: Scores, parts: Mapping[str, Scores]
) -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt=planned.prompt,
        seeds=planned.seeds,
        rewards=tuple(scores[request.id]),
        request_id=request.id,
        explored=bool(planned.explored),
        sde_steps=request.fidelity.sde_steps,
        parts={name: tuple(each[request.id]) for name, each in parts.items()},
    )


def audited_pairs(
    batch: Batch, requests: Sequence[GenerationRequest], scores: Scores
) -> tuple[list[float], list[float]] | None:
    """Exploration's and the full rollout's rewards of the audited prompt, seed by seed."""
    planned = next((p for p in batch.prompts if p.prompt.occurrence == batch.audit_occurrence), None)
    if planned is None:
        return None
    full = {
        seed: reward
        for request in requests
        if request.prompt.occurrence == batch.audit_occurrence
        for seed, reward in zip(request.seeds, scores[request.id], strict=True)
    }
    pairs = [(score.reward, full[score.seed]) for score in planned.explored if score.seed in full]
    return [explored for explored, _ in pairs], [rolled for _, rolled in pairs]
