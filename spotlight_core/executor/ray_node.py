"""One node's Ray processes, through the class that ``ray start`` itself uses, made fit to boot a fleet.

- Agents of the smallest kind, whatever is installed.  Ray finds out by an import that fails, and of
  threads that try it at once one may see it succeed half-way: its node would end with its agent.
- A raylet that has ended is told at once, where Ray would wait for it until its patience is over.
"""

import sys
import time

from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams

from spotlight_core.executor.ray_settings import REGISTER_SECONDS

LOOK_SECONDS = 0.1
_OPTIONAL = "ray.dashboard.optional_deps"


class RayNode(Node):
    """See the module's text."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """None: a head would start one whatever the flag for its pages says."""
        from ray.experimental import internal_kv

        self._webui_url = ""
        internal_kv._initialize_internal_kv(self.get_gcs_client())

    def start_ray_processes(self) -> None:
        super().start_ray_processes()
        raylet = self.all_processes["raylet"][0].process
        deadline = time.monotonic() + REGISTER_SECONDS
        while not self._registered():
            if raylet.poll() is not None:
                raise RuntimeError(f"its raylet ended with code {raylet.returncode}, see {self._logs_dir}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"its raylet did not register in {REGISTER_SECONDS} s")
            time.sleep(LOOK_SECONDS)

    def _registered(self) -> bool:
        try:
            services.get_node(self.gcs_address, self._node_id)
        except RuntimeError:
            return False
        return True


def start_node(parameters: RayParams, *, head: bool) -> RayNode:
    """Start the processes; returns once the head knows the node.  Several may boot at once.

    Raises:
        Exception: of Ray, when they do not come up.
    """
    sys.modules[_OPTIONAL] = None  # type: ignore[assignment]  # an import of it fails now, in every thread
    return RayNode(parameters, head=head, shutdown_at_exit=False, spawn_reaper=False)
