"""One RL iteration as a Prefect flow: `iterate` with the live phases."""

from prefect import flow

from spotlight_core.iteration import iterate
from spotlight_core.types import IterationReport
from tasks.live_run import current_run


@flow(name="rl-iteration", flow_run_name="iter {iteration}", retries=0, persist_result=False)
async def rl_iteration(run: str, iteration: int) -> IterationReport:
    """Roll out, reward, train beside exploration, select, publish, evaluate.

    ``run`` and ``iteration`` name the flow run; the live objects come from ``current_run``, since a
    flow's parameters are stored and shown.
    """
    live = current_run()
    report = await iterate(live.phases, live.state)
    await live.show(report)
    return report
