"""The recipe's schema: one frozen tree that says everything a run depends on.

``spotlight_core.recipes`` reads it from TOML; a run keeps it resolved, as JSON.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.config.exploration import (
    BanditConfig,
    ExplorationConfig,
    ExplorationSection,
    FixedArmConfig,
    NoExplorationConfig,
)
from spotlight_core.config.fleet import FleetConfig
from spotlight_core.config.learning import (
    AdvantageConfig,
    EmaConfig,
    GrpoGuardConfig,
    LossConfig,
    NftConfig,
    OptimizerConfig,
    TrainerConfig,
)
from spotlight_core.config.model import ModelConfig, TinyModelConfig
from spotlight_core.config.rewards import (
    OcrRewardConfig,
    RewardConfig,
    TemplateRewardConfig,
    WeightedRewardConfig,
)
from spotlight_core.config.sampling import OdeConfig, SamplerConfig
from spotlight_core.config.section import Section

RESERVED_NAMES = ("mlflow.db", "mlartifacts")  # of the stores beside the runs


class DataConfig(Section):
    prompts: Path
    """A folder with ``train`` and ``test`` as ``.txt``, one prompt a line, or as ``_metadata.jsonl``."""
    prompts_per_iteration: int = Field(8, ge=1, le=4096)
    """Prompts P of a batch."""
    seeds_per_prompt: int = Field(8, ge=2, le=4096)
    """Seeds K rolled out and trained for each prompt."""


class EvaluationConfig(Section):
    every: int = Field(4, ge=1)
    """Iterations between evaluations of the EMA weights."""
    images: int = Field(96, ge=1, le=100_000)
    """Held-out images of an evaluation on the way."""
    images_per_request: int = Field(16, ge=1)
    """Micro-batch of an evaluation request."""
    final_images: int = Field(400, ge=1, le=100_000)
    """Held-out images of the first and the last evaluation."""
    denoise_steps: int | None = Field(None, ge=2, le=1000)
    """ODE steps of an evaluation; the rollout's number when absent."""
    target: float = 0.9
    """The score to reach; its first sustained crossing (two evaluations) prices the run."""
    held_out_reward: RewardConfig = TemplateRewardConfig(type="template")
    """A reward that is evaluated and never trained."""


class ServicesConfig(Section):
    pools_mode: Literal["inline"] = "inline"
    """Where phases run: in the driver's process."""
    prefect_port: int = Field(0, ge=0, le=65535)
    """Port of the embedded Prefect API; 0 picks a free one."""
    ray_port: int = Field(0, ge=0, le=65535)
    """Port of the Ray head; 0 picks a free one."""
    torch_threads: int = Field(1, ge=1, le=1024)
    """Torch threads of each process; fixed, since sums depend on it."""


class RunConfig(Section):
    """A complete run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """Name of the run and of its folder."""
    rng_seed: int = Field(0, ge=0, lt=2**63)
    """Seed of every random draw of the run."""
    iterations: int = Field(ge=1, le=1_000_000)
    """RL iterations."""
    decisions: Literal["planned", "live", "replayed"] = "planned"
    """planned: exploration always completes, so weights do not depend on time; live: it has a deadline;
    replayed: the seeds that another run chose."""
    replay: Path | None = None
    """With replayed decisions, the folder of the run whose decision log is followed."""
    exploration_deadline_seconds: float = Field(10.0, gt=0)
    """With live decisions, how long exploration may go on after training ended."""
    model: ModelConfig = TinyModelConfig()
    data: DataConfig
    sampler: SamplerConfig = OdeConfig()
    reward: RewardConfig = OcrRewardConfig()
    loss: LossConfig = NftConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    ema: EmaConfig = EmaConfig()
    exploration: ExplorationConfig = NoExplorationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    fleet: FleetConfig = FleetConfig()
    elastic: ElasticConfig = ElasticConfig()
    services: ServicesConfig = ServicesConfig()
    prices: dict[str, float] = Field({"reserved": 10.08, "spot": 2.87, "on_demand": 10.08})
    """USD per GPU-hour of each pool: means of published prices of 9 June 2026."""

    @model_validator(mode="before")
    @classmethod
    def _default_types(cls, tree: Any) -> Any:
        """A table that names no ``type`` is of the default's type."""
        if not isinstance(tree, dict):
            return tree
        filled = dict(tree)
        for name, field in cls.model_fields.items():
            if isinstance(tree.get(name), dict) and hasattr(field.default, "type"):
                filled[name] = {"type": field.default.type, **tree[name]}
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        self._check_loss()
        if isinstance(self.loss, NftConfig) and self.loss.timesteps_per_sample > self.sampler.denoise_steps:
            raise ValueError(
                f"loss.timesteps_per_sample = {self.loss.timesteps_per_sample} exceeds "
                f"sampler.denoise_steps = {self.sampler.denoise_steps}: it trains at the sampler's levels"
            )
        if self.name in RESERVED_NAMES:
            raise ValueError(f"name {self.name!r} belongs to a store that runs share: choose another")
        self._check_advantage()
        self._check_prices()
        self._check_degree()
        if (self.decisions == "replayed") is not (self.replay is not None):
            raise ValueError(
                f"decisions = {self.decisions!r} and replay = {str(self.replay)!r}: say --replay RUN, or "
                "set both of them"
            )
        if isinstance(self.exploration, ExplorationSection):
            self._check_exploration(self.exploration)
        return self

    def _check_loss(self) -> None:
        loss, sampler = self.loss, self.sampler
        if isinstance(loss, NftConfig):
            return
        if isinstance(sampler, OdeConfig):
            raise ValueError(f"loss {loss.type} needs log-probabilities: set sampler.type = 'flow_sde'")
        if sampler.noise_level == 0:
            raise ValueError(
                f"loss {loss.type} needs log-probabilities and sampler.noise_level = 0 makes every step an "
                "ODE step: raise it"
            )
        if isinstance(loss, GrpoGuardConfig) and sampler.type != "flow_sde":
            raise ValueError(
                f"loss grpo_guard regulates the ratio with flow_sde's step std and -dt, which "
                f"{sampler.type} does not have: set sampler.type = 'flow_sde' or loss.type = 'grpo'"
            )

    def _check_advantage(self) -> None:
        several = isinstance(self.reward, WeightedRewardConfig) and len(self.reward.parts) > 1
        if self.advantage.rewards == "normalise_each" and not several:
            raise ValueError(
                f"advantage.rewards = 'normalise_each' adds the advantages of several rewards, and there is "
                f"one ({self.reward.type}): set advantage.rewards = 'sum' or reward.type = 'weighted' with "
                "more parts"
            )

    def _check_prices(self) -> None:
        fleet = self.fleet
        rented = {
            "reserved": fleet.reserved_nodes,
            "spot": fleet.spot_nodes,
            "on_demand": fleet.on_demand_nodes,
        }
        for pool, nodes in rented.items():
            if nodes and pool not in self.prices:
                raise ValueError(
                    f"prices has no entry for pool {pool!r}: add prices.{pool} = USD per GPU-hour"
                )
        for pool, price in self.prices.items():
            if pool not in rented:
                raise ValueError(f"prices.{pool}: unknown pool, the pools are {', '.join(rented)}")
            if not 0 <= price < float("inf"):
                raise ValueError(f"prices.{pool} = {price}: give USD per GPU-hour, 0 or more")

    def _check_degree(self) -> None:
        elastic, gpus = self.elastic, self.fleet.gpus_per_node
        degree = elastic.min_degree if elastic.sp_degree == "auto" else elastic.sp_degree
        if degree > gpus:
            raise ValueError(
                f"elastic asks for {degree} GPUs of a node together and fleet.gpus_per_node = {gpus}: "
                "an SP group is of one node; raise fleet.gpus_per_node or lower the degree"
            )
        if elastic.min_degree > degree:
            raise ValueError(
                f"elastic.min_degree = {elastic.min_degree} exceeds elastic.sp_degree = {degree}: lower it"
            )

    def _check_exploration(self, exploration: ExplorationSection) -> None:
        seeds: tuple[int, ...] = ()
        steps: tuple[int, ...] = ()
        if isinstance(exploration, FixedArmConfig):
            seeds, steps = (exploration.seeds_per_prompt,), (exploration.effective_steps,)
        elif isinstance(exploration, BanditConfig):
            seeds, steps = exploration.seeds_per_prompt or (), exploration.effective_steps or ()
            if self.decisions == "planned" and exploration.supply is None:
                raise ValueError(
                    f"exploration.type = {exploration.type!r} goes by measured times, and "
                    "decisions = 'planned' must not: set decisions = 'live', or exploration.supply"
                )
        for value in steps:
            if value > self.sampler.denoise_steps:
                raise ValueError(
                    f"exploration.effective_steps = {value} exceeds "
                    f"sampler.denoise_steps = {self.sampler.denoise_steps}"
                )
        for value in seeds:
            if value < self.data.seeds_per_prompt:
                raise ValueError(
                    f"exploration.seeds_per_prompt = {value} is below "
                    f"data.seeds_per_prompt = {self.data.seeds_per_prompt}: explore at least as many as you "
                    "train"
                )
        if exploration.unexplored_prompts >= self.data.prompts_per_iteration:
            raise ValueError("exploration.unexplored_prompts leaves no prompt to explore")


def flattened(config: RunConfig) -> dict[str, str]:
    """The resolved recipe as dotted keys, for experiment tracking."""

    def walk(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            yield prefix, json.dumps(value) if isinstance(value, list) else str(value)

    return dict(walk("", config.model_dump(mode="json")))
