"""What the scheduler's half tells the workers, step by step, and what they answer. Plain data, between processes.

scheduler                                     worker
looks a prompt up
FetchOrder  ───────────────────────────────►  reads the objects into host memory, and verifies them
            ◄───────────────────────────────  WorkerReport: it is there, or it failed
announces a hit
LoadOrder   ───────────────────────────────►  copies the bytes into vLLM's blocks, layer by layer
SaveOrder   ───────────────────────────────►  copies rows out as layers end, and writes objects
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from hybridkv.stream import DumpPoint


class FetchOrder(NamedTuple):
    """Read what a request at `start` needs to resume at `end`."""

    request: str
    start: int
    end: int
    keys: Mapping[int, bytes]
    """By the end of each object."""


class BlockTable(NamedTuple):
    """Blocks of one of vLLM's groups that a request has, from block number `first` on. 0: no block."""

    first: int
    ids: Sequence[int]


class LoadOrder(NamedTuple):
    """Copy what was fetched for a request into its blocks."""

    request: str
    start: int
    """Tokens before it are in the blocks already."""
    end: int
    tables: Sequence[BlockTable]
    """By vLLM's group. Those of states have each block that gets the state."""


class SaveOrder(NamedTuple):
    """Store objects that end at `points`."""

    request: str
    points: Sequence[DumpPoint]
    keys: Mapping[int, bytes]
    tables: Sequence[BlockTable]
    state_at: int
    """Position of the running state, which is in the block that `tables` has for it."""
    states: Mapping[int, int]
    """By vLLM's group: the block that has the running state, if it is not the one of the table."""


@dataclass
class StepOrders(KVConnectorMetadata):
    """Everything that workers do in one step."""

    identity: str
    """The weights' identity. A worker learns it here: only the scheduler computes it."""
    fetches: list[FetchOrder] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    """Requests whose fetched bytes are not needed any more."""
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    endings: list[SaveOrder] = field(default_factory=list)
    """Finished requests: vLLM keeps their blocks until the worker has reported that they are saved."""
    is_idle: bool = False
    """The step computes nothing: it may wait a moment for reads."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Fetches that have ended: by request, whether each rank has all bytes. One entry a rank."""

    fetched: dict[str, list[bool]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        requests = {**self.fetched, **other.fetched}
        return WorkerReport({one: [*self.fetched.get(one, ()), *other.fetched.get(one, ())] for one in requests})
