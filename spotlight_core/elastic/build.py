"""From a recipe to the policy that groups the ranks of its nodes."""

from spotlight_core.config import RunConfig
from spotlight_core.costs.files import read_costs
from spotlight_core.elastic.layout import FixedDegree, NodeLayout
from spotlight_core.elastic.planner import LayoutPlanner, RequestShape
from spotlight_core.errors import BadInputError


def build_layout(config: RunConfig) -> NodeLayout:
    """The recipe's policy: one degree, or the degrees that its cost model says finish most.

    Raises:
        BadInputError: ``sp_degree = "auto"`` without a cost model, or with one that cannot be read.
    """
    elastic = config.elastic
    if elastic.sp_degree != "auto":
        return FixedDegree(elastic.sp_degree, elastic.min_degree)
    if elastic.costs is None:
        raise BadInputError(
            'elastic.sp_degree = "auto" needs to know what a denoise step costs at each degree',
            "measure it with `spotlight profile`, name its file with elastic.costs, or give a number",
        )
    costs = read_costs(elastic.costs)
    fleet = config.fleet
    gpus = (fleet.reserved_nodes + fleet.spot_nodes) * fleet.gpus_per_node
    shape = RequestShape(
        tokens=costs.tokens,
        rows=config.data.seeds_per_prompt,  # a rollout's request holds the seeds of one prompt
        steps=config.sampler.denoise_steps,
        min_degree=elastic.min_degree,
    )
    return LayoutPlanner(costs=costs, shapes=(shape,), waiting=config.data.prompts_per_iteration / gpus)
