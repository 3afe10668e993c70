"""What a run will do, in a few lines before it starts, and where to look after it has ended.

Numbers that follow from the recipe stand as they are; estimates carry a ``~``.
"""

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import (
    BanditConfig,
    DiffusersModelConfig,
    FamilyConfig,
    FixedArmConfig,
    FluxConfig,
    OdeConfig,
    ProgressiveWindowConfig,
    RandomWindowConfig,
    RewardConfig,
    RunConfig,
    SamplerConfig,
    WanConfig,
    WeightedRewardConfig,
)
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.diffusion.models.families import guided
from spotlight_core.estimates.published import ModelSize
from spotlight_core.estimates.resources import (
    GIB,
    UTILISATION,
    Memory,
    Seconds,
    disk_of,
    gpu_named,
    memory_of,
    seconds_of,
    trained_parameters,
    trained_timesteps,
    untrained_forwards,
    work_of,
)
from spotlight_core.estimates.sizes import model_size
from spotlight_core.exploration.planner import arms_of
from spotlight_core.types import PolicyVersion, PromptRow
from spotlight_core.windows import sde_window
from tasks.run_folder import RunFolder
from tasks.services import prefect_environment

DEFAULT_GPU = "H100"
_ANY = PolicyVersion(label="base", number=0, digest="")


def describe(config: RunConfig, folder: RunFolder, gpu: str = DEFAULT_GPU) -> str:
    """The plan of a run: what trains, on which fleet, how many requests, at which price.

    With a diffusers model also its memory, seconds and dollars, estimated for the GPU of that name.

    Raises:
        BadInputError: a GPU whose speed is not known.
    """
    rows = {
        "run": f"{config.name} in {folder.path}",
        "training": f"{config.loss.type} on {_reward(config.reward)}, {config.iterations} iterations, "
        f"rng_seed {config.rng_seed}",
    }
    model = config.model
    if isinstance(model, DiffusersModelConfig):
        size = model_size(model)
        trained = trained_parameters(model, size)
        rows |= _model_rows(model, size, trained)
        rows |= _batch_rows(config) | _learning_rows(config, model) | _fleet_rows(config)
        rows["disk"] = f"~{_gib(disk_of(config, trained))} GiB for checkpoints and published weights"
        memory = memory_of(config, model, size)
        rows |= _estimate_rows(config, memory, seconds_of(config, model, size, gpu_named(gpu)), gpu)
    else:
        rows |= _batch_rows(config) | _fleet_rows(config)
    rows["decisions"] = config.decisions
    return "\n".join(f"{name:12} {text}" for name, text in rows.items())


def usd_per_hour(config: RunConfig) -> float:
    """The fleet's price while every node is there."""
    fleet, prices = config.fleet, config.prices
    return fleet.reserved_nodes * prices.get("reserved", 0.0) + fleet.spot_nodes * prices.get("spot", 0.0)


# -- what follows from the recipe --------------------------------------------------------------------------


def _batch_rows(config: RunConfig) -> dict[str, str]:
    prompts = read_prompts(config.data.prompts, "train")
    planner = BatchPlanner(config=config, sampler=GroupSampler(prompts=prompts, rng_seed=config.rng_seed))
    data, evaluation = config.data, config.evaluation
    batch = planner.plain(0, 0)
    explored = planner.explore(batch, _ANY)
    held_out = planner.evaluate([PromptRow(text="")] * evaluation.images, _ANY, 0)
    counts = f"{len(planner.rollout(batch, _ANY))} rollout, {len(explored)} exploration requests"
    exploration = "none"
    if isinstance(config.exploration, FixedArmConfig):
        arm = config.exploration
        exploration = f"{arm.seeds_per_prompt} seeds a prompt at {arm.effective_steps} effective steps"
    elif isinstance(config.exploration, BanditConfig):
        arms = arms_of(config.exploration, data.seeds_per_prompt, config.sampler.denoise_steps)
        seeds, steps = (
            {getattr(arm, what) for arm in arms} for what in ("seeds_per_prompt", "effective_steps")
        )
        exploration = (
            f"{config.exploration.type} over {len(arms)} arms, {min(seeds)} to {max(seeds)} seeds a prompt "
            f"at {min(steps)} to {max(steps)} effective steps, as training leaves time for"
        )
    return {
        "batch": f"{data.prompts_per_iteration} prompts × {data.seeds_per_prompt} seeds, "
        f"{config.sampler.denoise_steps} denoise steps",
        "exploration": exploration,
        "iteration": counts + f"; {len(held_out)} evaluation requests every {evaluation.every} iterations",
        "prompts": f"{len(prompts)} from {config.data.prompts}",
    }


def _fleet_rows(config: RunConfig) -> dict[str, str]:
    fleet = config.fleet
    return {
        "fleet": f"{fleet.reserved_nodes} reserved and {fleet.spot_nodes} spot nodes, "
        f"trace {fleet.trace.name if fleet.trace else 'none'}",
        "price": f"${usd_per_hour(config):.2f} per hour with every node there",
    }


def _model_rows(model: FamilyConfig, size: ModelSize, trained: int) -> dict[str, str]:
    frames = f" × {model.frames} frames" if isinstance(model, WanConfig) else ""
    how = "two forwards a velocity" if guided(model) else "one forward a velocity"
    if isinstance(model, FluxConfig):
        how = "an input of the transformer"
    if model.lora is None:
        what = f"all {_count(trained)} parameters of the transformer"
    else:
        share = f"{100 * trained / size.transformer:.1f} % of the transformer's {_count(size.transformer)}"
        what = (
            f"LoRA, rank {model.lora.rank}, alpha {model.lora.alpha:g}: {_count(trained)} parameters, {share}"
        )
    return {
        "model": f"{model.type} {model.path}, {model.height} × {model.width} pixels{frames}, "
        f"rollout in {model.rollout_dtype}, training in {model.training_dtype}",
        "parameters": f"transformer {_count(size.transformer)}, text encoders {_count(size.text_encoders)}, "
        f"VAE {_count(size.vae)} ({size.source})",
        "trained": what,
        "guidance": f"{model.guidance:g}, {how}",
    }


def _learning_rows(config: RunConfig, model: FamilyConfig) -> dict[str, str]:
    data, optimizer, evaluation = config.data, config.optimizer, config.evaluation
    samples, timesteps = data.prompts_per_iteration * data.seeds_per_prompt, trained_timesteps(config)
    work = work_of(config, model)
    shift = config.sampler.shift
    steps = evaluation.denoise_steps or config.sampler.denoise_steps
    updates = min(optimizer.updates_per_iteration, data.prompts_per_iteration)  # each has a whole group
    return {
        "sampler": f"{_sampler(config)}; "
        f"schedule {'of the model at this size' if shift is None else f'shifted by {shift:g}'}",
        "samples": f"{samples} an iteration, {timesteps} trained timesteps of each: {samples * timesteps}",
        "updates": f"{updates} optimizer steps an iteration on "
        f"{config.trainer.ranks} ranks, {optimizer.samples_per_forward} samples × "
        f"{min(optimizer.timesteps_per_forward, timesteps)} timesteps in a forward",
        "forwards": f"{work.rollout} rows of rollout, {work.explore} of exploration, {work.trained} with "
        f"backward, {work.untrained} without ({untrained_forwards(config)} a timestep)",
        "evaluation": f"{evaluation.images} images of {steps} ODE steps every {evaluation.every} iterations, "
        f"{evaluation.final_images} first and last; held out {_reward(evaluation.held_out_reward)}",
    }


def _sampler(config: RunConfig) -> str:
    sampler: SamplerConfig = config.sampler
    if isinstance(sampler, OdeConfig):
        return "ode, no stochastic step"
    said = f"{sampler.type}, noise level {sampler.noise_level:g}"
    if not sampler.noise_level:
        return f"{said}: no stochastic step"
    window, last = sampler.window, sampler.denoise_steps - 1
    first, end = sde_window(sampler, config.rng_seed, 0, "") or (0, 0)
    if isinstance(window, RandomWindowConfig):
        bound = last if window.end is None else window.end
        return f"{said}, {window.size} SDE steps somewhere in [{window.first}, {bound}) for each group"
    if isinstance(window, ProgressiveWindowConfig):
        return (
            f"{said}, {window.size} SDE steps from [{first}, {end}) on, "
            f"moving by {window.stride} every {window.iterations_per_move} iterations"
        )
    return f"{said}, SDE steps [{first}, {end})"


def _reward(reward: RewardConfig) -> str:
    if isinstance(reward, WeightedRewardConfig):
        return " + ".join(f"{part.weight:g} × {part.reward.type}" for part in reward.parts)
    return reward.type


# -- what is estimated -------------------------------------------------------------------------------------


def _estimate_rows(config: RunConfig, memory: Memory, seconds: Seconds, gpu_name: str) -> dict[str, str]:
    gpu, dtype = gpu_named(gpu_name), config.model.training_dtype
    iteration = seconds.iteration
    usd = iteration / 3600 * usd_per_hour(config)
    peak = gpu.bf16_tflops if dtype == "bf16" else gpu.fp32_tflops
    exploration = f"exploration ~{_round(seconds.explore)} beside it, " if seconds.explore else ""
    over = memory.training + memory.rollout > gpu.memory_gib * GIB
    warning = f"; more than the {gpu.memory_gib:g} GiB of one {gpu_name.upper()} together" if over else ""
    return {
        "memory": f"{_memory(memory)}{warning}",
        "seconds": f"~{_round(iteration)} an iteration: rollout ~{_round(seconds.rollout)}, "
        f"training ~{_round(seconds.train)}, {exploration}"
        f"evaluation ~{_round(seconds.evaluate)}",
        "cost": f"~${_round(usd)} an iteration; the run ~{_round(iteration * config.iterations / 3600)} "
        f"hours and ~${_round(usd * config.iterations)}",
        "assumed": f"{gpu_name.upper()} at {UTILISATION:.0%} of {peak:g} TFLOPS ({dtype}), every "
        "node there; text encoders, VAE, rewards, copies and waiting not counted (nothing was measured)",
    }


def _memory(memory: Memory) -> str:
    kept = {"kept policies": memory.kept} if memory.kept else {}
    frozen = {"frozen weights": memory.frozen} if memory.frozen else {}
    parts = {
        "text encoders": memory.text_encoders,
        **frozen,
        "trained weights": memory.trained,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "EMA": memory.average,
        **kept,
        "activations": memory.activations,
    }
    listed = ", ".join(f"{name} ~{_gib(value)}" for name, value in parts.items())
    return (
        f"~{_gib(memory.training)} GiB on each GPU of the trainer: {listed}; "
        f"~{_gib(memory.rollout)} GiB for a rollout's model on any GPU"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.1g}"


def _count(parameters: int) -> str:
    """Three digits, as nobody needs more."""
    if parameters >= 1e9:
        return f"~{parameters / 1e9:.3g} B"
    return f"~{parameters / 1e6:.3g} M"


def _round(value: float) -> str:
    """Two digits: an estimate has no more."""
    if value == 0:
        return "0"
    digits = f"{value:.2g}"
    return f"{float(digits):,.0f}" if abs(value) >= 10 else digits


# -- after the run -----------------------------------------------------------------------------------------


def warnings_of(folder: RunFolder) -> list[str]:
    """A line on what the coordinator and the nodes warned of, none when they did not: nothing that they say
    shows on the terminal while the run goes on."""
    counts: dict[str, int] = {}
    for log in sorted(folder.logs.glob("*.log")):
        if log.name not in ("driver.log", "prefect.log"):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            counts[log.name] = sum(" WARNING spotlight_core" in line for line in lines)
    told = ", ".join(f"{count} in {name}" for name, count in counts.items() if count)
    return [f"warnings {told} of {folder.logs}"] if told else []


def where_to_look(folder: RunFolder) -> str:
    """The report, and the commands that open Prefect's and MLflow's pages of the run."""
    from tasks.tracking import serve_command

    settings = prefect_environment(folder.runs, 4200)
    shown = ("PREFECT_HOME", "PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_URL")
    variables = " ".join(f"{name}={settings[name]}" for name in shown)
    return "\n".join(
        [
            *warnings_of(folder),
            f"report   {folder.report}",
            f"prefect  {variables} prefect server start --host 127.0.0.1 --port 4200",
            f"mlflow   {serve_command(folder.runs)}",
        ]
    )
