"""What a run rents, how it keeps in-flight work safe, and who tells it that a machine will go."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from spotlight_core.config.section import NO_FILE, Section

Pool = Literal["reserved", "spot", "on_demand"]


class NoNoticesConfig(Section):
    type: Literal["none"] = "none"
    """Nobody tells: a node that goes is noticed by its silence."""


class PolledNoticesConfig(Section):
    """What watchers that ask an endpoint again and again share."""

    poll_seconds: float = Field(1.0, gt=0, le=60)
    """Seconds between two questions."""


class AwsNoticesConfig(PolledNoticesConfig):
    type: Literal["aws"]
    """EC2's instance metadata, version 2: spot interruption and rebalance recommendation."""
    endpoint: str = "http://169.254.169.254"
    """The metadata service."""
    rebalance: bool = True
    """Take a rebalance recommendation for a notice of 120 seconds."""


class GcpNoticesConfig(PolledNoticesConfig):
    type: Literal["gcp"]
    """Compute Engine's metadata: instance/preempted, which answers when it changes."""
    endpoint: str = "http://metadata.google.internal"
    """The metadata service."""


class AzureNoticesConfig(PolledNoticesConfig):
    type: Literal["azure"]
    """Scheduled Events: a Preempt of this machine, acknowledged when its work is safe."""
    endpoint: str = "http://169.254.169.254"
    """The metadata service."""


class KubernetesNoticesConfig(PolledNoticesConfig):
    type: Literal["kubernetes"]
    """SIGTERM to the pod, and taints that announce the end of its node."""
    endpoint: str = "https://kubernetes.default.svc"
    """The API server; the pod's service account signs in, and NODE_NAME names the node."""


class FileNoticesConfig(PolledNoticesConfig):
    type: Literal["file"]
    """A file that appears: empty, or {"seconds_left": 30}."""
    path: str
    """Its path; {node} becomes the node's name."""


class HttpNoticesConfig(PolledNoticesConfig):
    type: Literal["http"]
    """An address that answers 204 or 404 in peace, and 200 with {"seconds_left": 30} for a notice."""
    url: str
    """Its address; {node} becomes the node's name."""


NoticesConfig = Annotated[
    NoNoticesConfig
    | AwsNoticesConfig
    | GcpNoticesConfig
    | AzureNoticesConfig
    | KubernetesNoticesConfig
    | FileNoticesConfig
    | HttpNoticesConfig,
    Field(discriminator="type"),
]


class StoreConfig(Section):
    url: str | None = None
    """Where commits of in-flight latents go: a folder, s3://bucket/prefix or gs://bucket/prefix; in the run's
    folder when absent."""
    memory_mib: float = Field(512.0, gt=0)
    """Commits kept in memory beside it; the oldest leave it first, and are read back when wanted."""


class FleetConfig(Section):
    reserved_nodes: int = Field(1, ge=1, le=64)
    """Nodes that train and roll out."""
    spot_nodes: int = Field(2, ge=0, le=64)
    """Nodes that roll out and explore, and may be taken away."""
    gpus_per_node: int = Field(1, ge=1, le=16)
    """GPUs of every node, each a group that denoises by itself."""
    min_rollout_gpus: int = Field(0, ge=0)
    """Below this many GPUs, on-demand nodes are rented until spot nodes are back."""
    on_demand_nodes: int = Field(0, ge=0, le=64)
    """The most on-demand nodes rented at once."""
    on_demand_after_seconds: float = Field(60.0, ge=0)
    """How long GPUs may be too few before an on-demand node is rented; of a sped-up trace's time."""
    trace: Path | None = None
    """Availability of the spot nodes, replayed; always there when absent or "none"."""
    trace_speedup: float = Field(60.0, gt=0)
    """Seconds of a clock-keyed trace that pass in one second of the run."""
    notices: NoticesConfig = NoNoticesConfig()
    grace_seconds: float = Field(30.0, gt=0)
    """Notice a provider gives when neither it nor the trace says."""
    commit_every_steps: int = Field(4, ge=0)
    """Denoise steps that a node lost without notice may cost a request; 0 commits on notice only."""
    store: StoreConfig = StoreConfig()
    order: Literal["fifo", "shortest_remaining", "earliest_deadline"] = "fifo"
    """Which request goes next among those of one urgency."""
    prefetch: bool = True
    """Hand each group its next request while it denoises the one before."""
    max_attempts: int = Field(8, ge=1)
    """Failures of one request before the run gives up on it."""
    max_node_failures: int = Field(3, ge=1)
    """Failures in a row after which a node is let go."""
    lease_seconds: float = Field(120.0, gt=0)
    """Silence after which a request's lease is taken for lost."""
    node_lease_seconds: float = Field(20.0, ge=1)
    """Silence after which a node is taken for lost, and one that hears nothing stops itself."""
    nodes_seconds: float = Field(600.0, gt=0)
    """How long requests may wait for any node at all before the run stops."""
    memory_gib: float = Field(3.0, gt=0)
    """Memory that must be free before the run starts."""

    @field_validator("trace", mode="before")
    @classmethod
    def _no_trace(cls, value: Any) -> Any:
        return None if value == NO_FILE else value

    @model_validator(mode="after")
    def _fallback_can_help(self) -> "FleetConfig":
        most = (self.reserved_nodes + self.spot_nodes + self.on_demand_nodes) * self.gpus_per_node
        if self.min_rollout_gpus > most:
            raise ValueError(
                f"fleet.min_rollout_gpus = {self.min_rollout_gpus}, and all nodes together have {most}: "
                "lower it, or raise fleet.on_demand_nodes"
            )
        if self.min_rollout_gpus and not self.on_demand_nodes and self.spot_nodes:
            raise ValueError(
                f"fleet.min_rollout_gpus = {self.min_rollout_gpus} and fleet.on_demand_nodes = 0: when spot "
                "is gone nothing may be rented in its place; raise fleet.on_demand_nodes"
            )
        if self.on_demand_nodes and not self.min_rollout_gpus:
            raise ValueError(
                f"fleet.on_demand_nodes = {self.on_demand_nodes} and fleet.min_rollout_gpus = 0: they would "
                "never be rented; say below how many GPUs they are with fleet.min_rollout_gpus"
            )
        return self
