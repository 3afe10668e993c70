"""The run's own Ray cluster on this machine: a head, and one raylet per node of the fleet.

Started through the classes that ``ray start`` itself uses: that command adds an autoscaler, a client
server on a fixed port and an API server, none of which is used here, and takes a process of two CPU
seconds a node.  Everything listens on 127.0.0.1 and asks for the run's token.

Each node's processes carry the node's name, so that a kill takes the whole node at once, as a
reclaimed machine would go.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import tenacity

from spotlight_core.errors import BadInputError, FleetError
from spotlight_core.executor.processes import (
    end_processes,
    ray_folder,
    remove_folder,
    run_processes,
)
from spotlight_core.executor.ray_settings import cluster_environment, node_environment, read_environment

LOG = logging.getLogger(__name__)

HOST = "127.0.0.1"
OBJECT_STORE_BYTES = 80 * 2**20  # results travel inline; Ray refuses less than 75 MiB
HEAD = ("head", 0)
SHARE = 0.001  # of a node's own resource, taken by each actor that is pinned to it
BOOT_ATTEMPTS = 2
DRAIN_SECONDS = 2.0


def check_port(port: int, key: str) -> None:
    """Fail early on a port that is taken; 0 always passes.

    Raises:
        BadInputError: something listens there.
    """
    if not port:
        return
    with socket.socket() as probe:
        # A port in TIME_WAIT can be bound again by a server; a listening one cannot.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise BadInputError(
                f"{key} = {port}: the port is in use ({error.strerror})",
                f"free it, or set {key} = 0 to take a free one",
            ) from error


def node_resource(name: str, incarnation: int) -> str:
    """The custom resource that pins an actor to its node."""
    return f"node:{name}-{incarnation}"


class RayCluster:
    """See the module's text.  ``port`` is the head's; 0 picks a free one."""

    def __init__(self, run_id: str, temp_folder: Path | None = None, port: int = 0) -> None:
        self.run_id = run_id
        self.folder = temp_folder or ray_folder(run_id)
        self._port = port
        self._nodes: dict[tuple[str, int], Any] = {}
        self._booting: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._former_environment: dict[str, str | None] = {}
        self._connected = False

    @property
    def address(self) -> str:
        """``host:port`` of the head."""
        return str(self._nodes[HEAD].gcs_address)

    def start_head(self) -> None:
        """Start the head, with nothing on it that could run work.

        Raises:
            BadInputError: the port is taken, or the temporary folder is another user's.
            FleetError: Ray does not come up.
        """
        check_port(self._port, "services.ray_port")
        self._make_folder()
        self._enter_environment()
        self._boot(*HEAD, {"gcs_server_port": self._port, "no_monitor": True})

    def connect(self) -> None:
        """Make this process a driver of the cluster."""
        import ray

        # Ray prints a paragraph to the terminal for each lost node, long after we have acted on it.
        ray._private.worker.print_to_stdstream = _log_lines
        with _signal_handlers_kept():
            ray.init(
                address=self.address,
                namespace=self.run_id,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address=self._host_of(HEAD[0]),
            )
        self._connected = True

    def add_node(self, name: str, incarnation: int, gpus: Sequence[str] = ()) -> int:
        """Start a node and return its raylet's pid once it is registered; several may boot at once.

        ``gpus`` are the only ones that the node's processes see.

        Raises:
            FleetError: the node does not come up.
        """
        retrying = tenacity.Retrying(
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(BOOT_ATTEMPTS), tenacity.stop_when_event_set(self._stopping)
            ),
            retry=tenacity.retry_if_exception_type(FleetError),
            reraise=True,
        )
        extra = {"gcs_address": self.address, "node_manager_port": 0}
        node = retrying(self._boot, name, incarnation, extra, gpus)
        return _raylet(node).pid

    def alive(self, name: str, incarnation: int) -> bool:
        """Whether the node's raylet runs."""
        node = self._nodes.get((name, incarnation))
        return node is not None and _raylet(node).poll() is None

    def drain(self, name: str, incarnation: int, seconds_left: float) -> None:
        """Tell Ray that the node leaves in ``seconds_left``, so that it places nothing there any more.

        Ray is not relied upon: one that does not answer or refuses is only logged.
        """
        with self._lock:
            node = self._nodes.get((name, incarnation))
        if node is None:
            return
        deadline_ms = int((time.time() + seconds_left) * 1000)
        try:
            from ray._private.worker import global_worker
            from ray.core.generated import autoscaler_pb2

            reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
            # The driver's own client: one of the node's would outlive the cluster, and Ray ends a process
            # whose client has not reached its server for a minute.
            accepted, why = global_worker.gcs_client.drain_node(
                node.node_id, reason, "preemption notice", deadline_ms, timeout=DRAIN_SECONDS
            )
            if not accepted:
                LOG.info("Ray does not drain %s-%d: %s", name, incarnation, why)
        except Exception as error:  # Ray's own class here differs from version to version
            LOG.info("Ray does not drain %s-%d: %r", name, incarnation, error)

    def head_alive(self) -> bool:
        """Whether the head's gcs and raylet run: Ray aborts the driver a minute after they have ended."""
        with self._lock:
            head = self._nodes.get(HEAD)
        if head is None:
            return False
        vital = [*head.all_processes["gcs_server"], *head.all_processes["raylet"]]
        return all(info.process.poll() is None for info in vital)

    def kill_node(self, name: str, incarnation: int) -> None:
        """SIGKILL the node's whole process tree, as a machine would go; none is fine too."""
        self._end(name, incarnation, terminate_seconds=0.0)

    def remove_node(self, name: str, incarnation: int) -> None:
        """Let the raylet sign off, then end what is left."""
        self._end(name, incarnation, terminate_seconds=2.0)

    def stop(self) -> None:
        """End every node and the head, and remove the temporary folder.

        Safe to call twice: the second time catches a node whose boot was under way at the first.
        """
        self._stopping.set()
        if self._connected:
            import ray

            self._connected = False
            ray.shutdown()
            ray.experimental.internal_kv._internal_kv_reset()
        with self._lock:
            keys = self._nodes.keys() | self._booting
        for name, incarnation in sorted(keys, key=lambda key: key == HEAD):
            self.kill_node(name, incarnation)
        remove_folder(self.folder)
        self._leave_environment()

    # -- starting -------------------------------------------------------------------------------------

    def _boot(self, name: str, incarnation: int, extra: dict[str, Any], gpus: Sequence[str] = ()) -> Any:
        """Start Ray's processes for one node; waits until the head knows it."""
        from ray._private.parameter import RayParams

        from spotlight_core.executor.ray_node import start_node

        sockets = self.folder / "s"
        parameters = RayParams(
            num_cpus=0,  # work is placed by the node's own resource alone
            num_gpus=len(gpus),
            resources={node_resource(name, incarnation): 1.0},
            object_store_memory=OBJECT_STORE_BYTES,
            min_worker_port=0,
            max_worker_port=0,
            include_log_monitor=False,
            include_dashboard=False,
            temp_dir=str(self.folder),
            node_ip_address=self._host_of(name),
            # Named here: Ray numbers them by what it finds, and nodes that boot at once find the same.
            raylet_socket_name=str(sockets / f"{name}-{incarnation}.r"),
            plasma_store_socket_name=str(sockets / f"{name}-{incarnation}.p"),
            env_vars=node_environment(name, incarnation, gpus),
            **extra,
        )
        for left in sockets.glob(f"{name}-{incarnation}.*"):  # by an attempt that failed
            left.unlink()
        with self._lock:
            self._booting.add((name, incarnation))
        try:
            node = start_node(parameters, head=(name, incarnation) == HEAD)
        except Exception as error:  # Ray raises plain Exception here
            end_processes(run_processes(self.run_id, f"{name}-{incarnation}"), grace_seconds=0.0)
            raise FleetError(
                f"Ray node {name}-{incarnation} did not start ({error})",
                "end what else keeps this machine busy or its memory full, and try again",
            ) from error
        with self._lock:
            self._booting.discard((name, incarnation))
            self._nodes[name, incarnation] = node
        return node

    def _host_of(self, name: str) -> str:
        """The address that a node's processes have: all are on this machine."""
        return HOST

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            if self.folder.is_symlink() or self.folder.stat().st_uid != os.getuid():
                raise BadInputError(
                    f"{self.folder} belongs to another user",
                    "remove it, or set TMPDIR to a folder of your own",
                ) from None
            remove_folder(self.folder)
            self.folder.mkdir(mode=0o700)
        (self.folder / "s").mkdir()
        token = os.open(self.folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(token, "w") as file:
            file.write(secrets.token_hex(32))

    def _enter_environment(self) -> None:
        """Ray reads its settings from the environment, this process's driver as well as what it starts."""
        settings = cluster_environment(self.run_id, self.folder / "token")
        self._former_environment = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False  # else 127.0.0.1 is replaced by the outside address
        read_environment()

    def _leave_environment(self) -> None:
        for name, value in self._former_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._former_environment:
            read_environment()
        self._former_environment = {}

    # -- ending ---------------------------------------------------------------------------------------

    def _end(self, name: str, incarnation: int, terminate_seconds: float) -> None:
        with self._lock:
            node = self._nodes.pop((name, incarnation), None)
        started = [] if node is None else _started_processes(node)
        if node is not None:
            # Whoever still holds the node must not hold its client: Ray ends a process one of whose clients
            # has not reached its server for a minute, even when that was another cluster's.
            node._gcs_client = None
        if node is not None and terminate_seconds > 0:
            raylet = _raylet(node)
            raylet.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                raylet.wait(terminate_seconds)
        own = []
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                own.append(psutil.Process(process.pid))
        end_processes([*own, *run_processes(self.run_id, f"{name}-{incarnation}")], grace_seconds=0.0)
        for process in started:  # our children: collect them, or they stay as zombies
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)


def _log_lines(data: dict[str, Any], **_: object) -> None:
    LOG.debug("Ray: %s", " ".join(data["lines"]))


def _raylet(node: Any) -> "subprocess.Popen[bytes]":
    process: subprocess.Popen[bytes] = node.all_processes["raylet"][0].process
    return process


def _started_processes(node: Any) -> list["subprocess.Popen[bytes]"]:
    return [info.process for infos in node.all_processes.values() for info in infos]


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """``ray.init`` takes over SIGTERM when it may; the command line has its own way to end a run."""
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, former)
