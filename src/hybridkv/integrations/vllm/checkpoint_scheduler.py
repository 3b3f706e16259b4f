"""vLLM's scheduler with more places where prefill chunks end, and with them states that can be saved.

vLLM has a state only where a chunk ends, and ends chunks of hybrid models at whole unified blocks. Without this class a
repeated prompt resumes at such a block, and prompts that part inside one share nothing of it.

    vllm serve MODEL --scheduler-cls hybridkv.integrations.vllm.checkpoint_scheduler.CheckpointScheduler ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from hybridkv.integrations.vllm.catalogue import BLOCK_TOKENS
from hybridkv.integrations.vllm.connector import HybridKVConnector

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LEAST_TOKENS = 64
"""A chunk is not cut closer than this to its start, but for breakpoints: a state saves at least so many tokens."""
CHECKPOINT_TOKENS = "checkpoint_tokens"
"""Field of `kv_connector_extra_config`."""
DEFAULT_CHECKPOINT_TOKENS = 512
BREAKPOINTS = "breakpoints"
"""Field of a request's `kv_transfer_params`: token positions where other prompts may part from this one."""


class CheckpointScheduler(AsyncScheduler):
    """Chunks also end at multiples of `checkpoint_tokens`, at breakpoints that requests name, where a prompt leaves
    others that are stored, and at the last block of 16 tokens before its last token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        transfer = self.vllm_config.kv_transfer_config
        given = {} if transfer is None else transfer.kv_connector_extra_config
        self._checkpoint_tokens = int(given.get(CHECKPOINT_TOKENS, DEFAULT_CHECKPOINT_TOKENS))

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        count = super()._mamba_block_aligned_split(
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        places = breakpoints_of(request)
        if isinstance(self.connector, HybridKVConnector):
            places.append(self.connector.branch_of(request))
        return cut(start, int(count), request.num_prompt_tokens, self._checkpoint_tokens, places)


def breakpoints_of(request: Request) -> list[int]:
    """Those that a request names. What is no position is left out: a cache must not refuse a request."""
    given = (request.kv_transfer_params or {}).get(BREAKPOINTS, ())
    return [one for one in given if isinstance(one, int)] if isinstance(given, (list, tuple)) else []


def cut(start: int, count: int, num_prompt_tokens: int, grid: int, breakpoints: Sequence[int]) -> int:
    """Tokens of a chunk from `start` on that may have `count`: up to the first place worth a state.

    `grid`: multiples of it are; 0 for none. Replies that are computed again after a preemption are not cut.
    """
    if start >= num_prompt_tokens:
        return count
    last = (num_prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    on_grid = [-(-(start + _LEAST_TOKENS) // grid) * grid] if grid else []
    places = [place for place in (last, *on_grid) if place >= start + _LEAST_TOKENS]
    places += [point // BLOCK_TOKENS * BLOCK_TOKENS for point in breakpoints]
    return min((place - start for place in places if start < place < start + count), default=count)
