"""The run as a Prefect flow: base evaluation, RL iterations, checkpoints, report."""

from prefect import flow

from flows.rl_iteration import rl_iteration
from tasks.live_run import current_run


@flow(name="post-train", flow_run_name="{run}", retries=0, persist_result=False)
async def post_train(run: str, iterations: int) -> None:
    """Post-train one policy.  Everything but the names comes from ``current_run``."""
    live = current_run()
    async with live.tracked():
        state = await live.begin()
        while state.iteration < iterations:
            report = await rl_iteration(run, state.iteration)
            state = await live.checkpoint(report)
        await live.finish()
