"""What a run will do, in a few lines before it starts, and where to look after it has ended."""

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import FixedArmConfig, RunConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.types import PolicyVersion
from tasks.run_folder import RunFolder
from tasks.services import prefect_environment

_ANY = PolicyVersion(label="base", number=0, digest="")


def describe(config: RunConfig, folder: RunFolder) -> str:
    """The plan of a run: what trains, on which fleet, how many requests, at which price."""
    prompts = read_prompts(config.data.prompts / "train.txt")
    planner = BatchPlanner(config=config, sampler=GroupSampler(prompts=prompts, rng_seed=config.rng_seed))
    data, fleet, evaluation = config.data, config.fleet, config.evaluation
    batch = planner.plain(0, 0)
    explored = planner.explore(batch, _ANY)
    held_out = planner.evaluate([""] * evaluation.images, _ANY, 0)
    counts = f"{len(planner.rollout(batch, _ANY))} rollout, {len(explored)} exploration requests"
    prices = config.prices
    hourly = fleet.reserved_nodes * prices["reserved"] + fleet.spot_nodes * prices.get("spot", 0.0)
    exploration = "none"
    if isinstance(config.exploration, FixedArmConfig):
        arm = config.exploration
        exploration = f"{arm.seeds_per_prompt} seeds a prompt at {arm.effective_steps} effective steps"
    rows = {
        "run": f"{config.name} in {folder.path}",
        "training": f"{config.loss.type} on {config.reward.type}, {config.iterations} iterations, "
        f"rng_seed {config.rng_seed}",
        "batch": f"{data.prompts_per_iteration} prompts × {data.seeds_per_prompt} seeds, "
        f"{config.sampler.denoise_steps} denoise steps",
        "exploration": exploration,
        "iteration": counts + f"; {len(held_out)} evaluation requests every {evaluation.every} iterations",
        "prompts": f"{len(prompts)} from {config.data.prompts}",
        "fleet": f"{fleet.reserved_nodes} reserved and {fleet.spot_nodes} spot nodes, "
        f"trace {fleet.trace.name if fleet.trace else 'none'}",
        "price": f"${hourly:.2f} per hour with every node there",
        "decisions": config.decisions,
    }
    return "\n".join(f"{name:12} {text}" for name, text in rows.items())


def where_to_look(folder: RunFolder) -> str:
    """The report, and the commands that open Prefect's and MLflow's pages of the run."""
    from tasks.tracking import serve_command

    settings = prefect_environment(folder.runs, 4200)
    shown = ("PREFECT_HOME", "PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_URL")
    variables = " ".join(f"{name}={settings[name]}" for name in shown)
    return "\n".join(
        [
            f"report   {folder.report}",
            f"prefect  {variables} prefect server start --host 127.0.0.1 --port 4200",
            f"mlflow   {serve_command(folder.runs)}",
        ]
    )
