"""How the GPUs of a node share the sequence of one request, and what happens when one comes or goes."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from spotlight_core.config.section import NO_FILE, Section


class ElasticConfig(Section):
    sp_degree: int | Literal["auto"] = 1
    """GPUs of a node that denoise one request together; auto takes what the cost model says finishes most
    requests for a dollar.  Fewer work together where a node has fewer left."""
    min_degree: int = Field(1, ge=1, le=16)
    """The fewest that can hold a request: what memory asks for."""
    costs: Path | None = None
    """A cost model that `spotlight profile` wrote, which sp_degree = "auto" needs."""
    standby: bool = False
    """Keep a booted process on each node that takes the place of a lost one, for a copy of weights."""
    on_change: Literal["regroup", "restart"] = "regroup"
    """When a GPU of a node comes or goes: regroup between two denoise steps, or restart all its processes."""
    sleep: bool = False
    """Reserved nodes hold no weights on their GPUs while training uses these."""
    communicator: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    """What carries the collectives of a group: shm on CPU and nccl on CUDA when auto."""
    hung_seconds: float = Field(2.0, ge=0.5)
    """Silence of a process after which its group goes on without it; never less than three denoise steps."""

    def needs_store(self, device_type: str) -> bool:
        """Whether the groups on ``device_type`` meet over a store of torch, which the node's owner hosts."""
        return self.communicator in ("gloo", "nccl") or (
            self.communicator == "auto" and device_type == "cuda"
        )

    @field_validator("sp_degree")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if value != "auto" and not 1 <= value <= 16:
            raise ValueError(f'sp_degree = {value}: give 1 to 16, or "auto"')
        return value

    @model_validator(mode="after")
    def _no_standby_of_a_restart(self) -> "ElasticConfig":
        if self.standby and self.on_change == "restart":
            raise ValueError('standby and on_change = "restart" are two answers to one question: drop one')
        return self

    @field_validator("costs", mode="before")
    @classmethod
    def _no_costs(cls, value: Any) -> Any:
        return None if value == NO_FILE else value
