"""The seam into vLLM's `KVCacheManager.allocate_slots`: hits are admitted only if all their blocks are free.

vLLM 0.32 counts the blocks of a request, compares them with the free ones, and takes them. For a model with states
(`mamba_cache_mode` align) and a hit of a connector that count is too small. Each group of states takes two blocks,

    tokens    │ hit of the connector  │ chunk that is computed │
    blocks    │  null  │ state at hit │  null  │ running state │

and `MambaManager.get_num_blocks_to_allocate` counts one. If just the missing blocks are not free, `schedule()` raises
"Cannot get 1 free blocks from the pool", and the engine ends with all its requests. No hook of a connector is called
between vLLM's count and the taking, so the count is made here, in front of vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

GiveUp = Callable[["Request"], None]
"""Called with a request whose hit does not fit, while nothing runs that would free blocks: it is to be computed."""
_PATIENCE = 8
"""Number of steps in which nothing runs until a hit is given up: blocks of requests that have ended come back a step or
two later. Larger: a request waits longer for blocks that a paused session keeps."""


def guard(manager: KVCacheManager, give_up: GiveUp) -> None:
    """Let `manager` admit hits only if they fit. Several connectors of one engine may call this."""
    if not isinstance(manager.allocate_slots, Admission):
        manager.allocate_slots = Admission(manager)
    manager.allocate_slots.give_up.append(give_up)


class Admission:
    """Stands in for a manager's `allocate_slots`."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.give_up: list[GiveUp] = []
        self._idle_steps = 0
        """Number of steps since anything ran, if a hit waits."""
        self._manager = manager
        self._allocate_slots = manager.allocate_slots

    def __call__(
        self,
        request: Request,
        num_new_tokens: int,
        *args: Any,
        num_external_computed_tokens: int = 0,
        has_scheduled_reqs: bool = True,
        **options: Any,
    ) -> KVCacheBlocks | None:
        """Return None, as vLLM does, if the request must wait for free blocks."""
        if num_external_computed_tokens:
            computed = options.get("num_new_computed_tokens", 0) + num_external_computed_tokens
            needed = self._blocks(computed, computed + num_new_tokens, **options)
            if needed > self._manager.block_pool.get_num_free_blocks():
                self._wait(request, has_scheduled_reqs)
                return None
            self._idle_steps = 0
        return self._allocate_slots(
            request,
            num_new_tokens,
            *args,
            num_external_computed_tokens=num_external_computed_tokens,
            has_scheduled_reqs=has_scheduled_reqs,
            **options,
        )

    def _wait(self, request: Request, others_run: bool) -> None:
        self._idle_steps = 0 if others_run else self._idle_steps + 1
        if self._idle_steps >= _PATIENCE:
            self._idle_steps = 0
            for give_up in self.give_up:
                give_up(request)

    def _blocks(
        self,
        computed: int,
        end: int,
        *,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        **_: Any,
    ) -> int:
        """Return how many free blocks are taken for a request that begins at `computed` and computes up to `end`."""
        managers = self._manager.coordinator.single_type_managers
        found = new_computed_blocks.blocks if new_computed_blocks is not None else [()] * len(managers)
        return sum(
            taken(manager, blocks, computed, end, num_lookahead_tokens)
            for manager, blocks in zip(managers, found, strict=True)
        )


def taken(
    manager: SingleTypeKVCacheManager, found: Sequence[KVCacheBlock], computed: int, end: int, lookahead: int
) -> int:
    """Return how many free blocks one group takes. `found`: its blocks in vLLM's own cache."""
    size: int = manager.block_size
    skipped: int = manager.get_num_skipped_tokens(computed) // size
    at_hit = -(-computed // size)
    visible = found[skipped:at_hit]
    if isinstance(manager, MambaManager) and manager.mamba_cache_mode == "align":
        spec = manager.kv_cache_spec
        running = min(-(-end // size) - at_hit, 1 + spec.num_prefill_checkpoint_blocks)
        count: int = at_hit + running + spec.num_speculative_blocks
    else:
        count = -(-(end + lookahead) // size)
    touched = [block for block in visible if not block.ref_cnt and not block.is_null]
    return count - skipped - len(visible) + len(touched)
