"""The scheduler's half: looks prompts up, announces what workers have fetched, and decides what is saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from secrets import token_hex
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from hybridkv.integrations.vllm.catalogue import BLOCK_TOKENS, make_catalogue, refuse_small_buffers, shared_identity
from hybridkv.integrations.vllm.groups import Table, known_layers
from hybridkv.integrations.vllm.messages import BlockTable, FetchOrder, LoadOrder, SaveOrder, StepOrders, WorkerReport
from hybridkv.integrations.vllm.model import model_identity, model_spec
from hybridkv.integrations.vllm.request_keys import RequestTokens, is_keyed
from hybridkv.integrations.vllm.saving import points_of_end, points_of_step
from hybridkv.integrations.vllm.settings import Settings
from hybridkv.integrations.vllm.stores import open_shared, release, seen_by_all
from hybridkv.stream import DumpPoint, DumpRule, Fetch, Finder, StreamStats

if TYPE_CHECKING:
    from vllm.v1.request import Request

_IDLE_WAIT_S = 0.005
"""While no request runs, a request waits so long for a lookup before vLLM's loop goes round: spinning would slow it."""
_SAVED_ENDS = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class Stage(Enum):
    """What is known of a request's hit.

    NEW ──► ASKED ──► FETCHING ──► READY ──► DONE
     ▲        └──────────┴───────────┴────────►│   nothing found, failed, or not needed any more
     └────────────────────────────────────────┘   preempted: asked again
    """

    NEW = "new"
    ASKED = "asked"
    FETCHING = "fetching"
    READY = "ready"
    DONE = "done"


@dataclass
class Tracked:
    """A request that is not finished."""

    request: Request
    tokens: RequestTokens
    stage: Stage = Stage.NEW
    preemptions: int = 0
    fetch: Fetch | None = None
    start: int = 0
    """What is fetched begins here."""
    end: int = 0
    branch: int = 0
    """Full-attention KV is stored up to here, but no state or window. 0: not deeper than `end`."""
    staged_bytes: int = 0
    reports: list[bool] = field(default_factory=list)
    stored_until: int | None = None
    """Full stretches up to here were saved, or were found: before the first step of the request. None: no step yet."""


class SchedulerHalf:
    """Called on the scheduler's thread."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
        self.stats = StreamStats()
        self.counts: Counter[str] = Counter()
        """Requests by outcome, tokens of hits, and bytes of hits by group."""
        self._settings = settings
        model = model_spec(config, kv_cache_config, rank=0)
        layers = known_layers(kv_cache_config, model, BLOCK_TOKENS)
        self._tables = sorted({known.table for known in layers.values()})
        self._base_identity = self.identity = shared_identity(model, model_identity(config))
        self._catalogue = make_catalogue(model, self.identity)
        refuse_small_buffers(self._catalogue, settings)
        self._rule = DumpRule(self._catalogue)
        self._world_size = config.parallel_config.world_size
        self._urls = seen_by_all(settings.store) if settings.separate else list(settings.store)
        self._store = open_shared(self._urls)
        self._finder = Finder(
            self._store, self._catalogue, self.stats, timeout_s=settings.lookup_timeout_s, on_answer=lambda: None
        )
        self._tracked: dict[str, Tracked] = {}
        self._staged_bytes = 0
        self._loads: dict[str, int] = {}
        """Requests of the next step that load, and the position from which each does."""
        self._orders = StepOrders(self.identity)
        self._is_idle = True
        """The last step computed nothing."""

    # --- hits ---------------------------------------------------------------------------------------------------------

    def matched(self, request: Request, num_computed: int) -> int | None:
        """Tokens after `num_computed` that workers have in host memory. None: ask again later."""
        if not self._settings.loads or request.skip_reading_prefix_cache or not is_keyed(request):
            return 0
        tracked = self._track(request)
        if request.num_preemptions != tracked.preemptions:
            self._end_fetch(tracked)
            tracked.preemptions, tracked.stage = request.num_preemptions, Stage.NEW
        if tracked.stage is Stage.NEW:
            self._ask(tracked, num_computed)
        if tracked.stage is Stage.ASKED:
            self._answered(tracked, num_computed)
        if tracked.stage in (Stage.ASKED, Stage.FETCHING):
            return None
        if tracked.stage is Stage.DONE:
            return 0
        if not tracked.start <= num_computed < tracked.end:
            self._end_fetch(tracked)  # vLLM's own cache has changed: it has it all, or has lost what came before
            return 0
        return tracked.end - num_computed

    def _track(self, request: Request) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, RequestTokens(request, BLOCK_TOKENS), preemptions=request.num_preemptions)
            self._tracked[request.request_id] = tracked
        return tracked

    def _ask(self, tracked: Tracked, num_computed: int) -> None:
        limit = tracked.request.num_tokens - 1
        tracked.start = num_computed
        tracked.fetch = self._finder.find(tracked.tokens.keys, tracked.tokens.upto(limit), num_computed, limit)
        tracked.stage = Stage.DONE if tracked.fetch is None else Stage.ASKED

    def _answered(self, tracked: Tracked, num_computed: int) -> None:
        """Order a fetch if the lookup has found something, and if there is room for it."""
        fetch = tracked.fetch
        assert fetch is not None
        if self._is_idle:
            fetch.wait(_IDLE_WAIT_S)
        if fetch.is_late:
            self.stats.slow_lookups += 1
            self._missed(tracked, "late")
        elif fetch.is_answered:
            self.stats.failed_lookups += fetch.has_failed
            end = fetch.position
            tracked.branch = fetch.matched if fetch.matched > end else 0
            if end <= max(num_computed, tracked.start):
                self._missed(tracked, "checkpoint_missing" if tracked.branch > tracked.start else "not_stored")
                return
            nbytes = self._catalogue.load_bytes(tracked.start, end)
            if nbytes > self._settings.staging_bytes:
                self._missed(tracked, "too_large")
            elif self._staged_bytes + nbytes <= self._settings.staging_bytes:
                self._order_fetch(tracked, end, nbytes)

    def _missed(self, tracked: Tracked, reason: str) -> None:
        self.counts[reason] += 1
        tracked.stage = Stage.DONE

    def branch_of(self, request: Request) -> int:
        """Where the prompt has left others whose KV is stored deeper than any state or window; 0 if nowhere."""
        tracked = self._tracked.get(request.request_id)
        return tracked.branch if tracked is not None else 0

    def _order_fetch(self, tracked: Tracked, end: int, nbytes: int) -> None:
        self.stats.found += 1
        tracked.stage, tracked.end, tracked.staged_bytes, tracked.reports = Stage.FETCHING, end, nbytes, []
        self._staged_bytes += nbytes
        keys = tracked.tokens.at(sorted(self._catalogue.load_ends(tracked.start, end)))
        self._orders.fetches.append(FetchOrder(tracked.request.request_id, tracked.start, end, keys))

    def give_up(self, request: Request) -> None:
        """Let vLLM compute a request whose hit needs more blocks than are free."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.stage is Stage.READY:
            self.counts["no_room"] += 1
            self._end_fetch(tracked)

    def _end_fetch(self, tracked: Tracked) -> None:
        """The request needs nothing of what workers have fetched or are fetching."""
        if tracked.stage in (Stage.FETCHING, Stage.READY):
            self._orders.drops.append(tracked.request.request_id)
            self._release_staging(tracked)
        tracked.stage = Stage.DONE

    def _release_staging(self, tracked: Tracked) -> None:
        self._staged_bytes -= tracked.staged_bytes
        tracked.staged_bytes = 0

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], num_external: int) -> set[int]:
        """vLLM has given a request blocks. `num_external`: tokens that it expects from us; another may supply them.

        Returns blocks that vLLM must not share: those that the load fills only in part.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.stage is not Stage.READY:
            return set()
        if not num_external:
            self._end_fetch(tracked)
            return set()
        self._loads[request.request_id] = tracked.end - num_external
        self.counts["hit"] += 1
        self.counts["hit_tokens"] += num_external
        for group, nbytes in self._catalogue.load_bytes_by_group(tracked.end - num_external, tracked.end).items():
            self.counts[f"bytes {group}"] += nbytes
        self._release_staging(tracked)
        tracked.stage = Stage.DONE
        return self._filled_in_part(tracked.end - num_external, tracked.end, block_ids)

    def _filled_in_part(self, start: int, end: int, block_ids: Sequence[Sequence[int]]) -> set[int]:
        """The first block of each window: what is before the first visible token is not loaded."""
        found = set()
        for table in self._tables:
            number, tokens = divmod(max(start, table.sight.first_visible(end)), table.block_tokens)
            if table.sight.is_local and tokens >= BLOCK_TOKENS:
                found.add(block_ids[table.number][number])
        return found

    def reported(self, output: KVConnectorOutput) -> None:
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            return
        for request, reports in report.fetched.items():
            tracked = self._tracked.get(request)
            if tracked is None or tracked.stage is not Stage.FETCHING:
                continue
            tracked.reports += reports
            if len(tracked.reports) < self._world_size:
                continue
            if all(tracked.reports):
                tracked.stage = Stage.READY
            else:
                self.counts["failed"] += 1
                self._end_fetch(tracked)

    # --- saves --------------------------------------------------------------------------------------------------------

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Everything that workers do in the step that was scheduled."""
        orders, self._orders = self._orders, StepOrders(self.identity)
        orders.is_idle = self._is_idle = not output.total_num_scheduled_tokens
        for request, start in self._loads.items():
            orders.loads.append(self._load_order(output, request, start))
        self._loads = {}
        if self._settings.saves:
            computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request, count in output.num_scheduled_tokens.items():
                self._save_step(orders, output, request, computed[request], computed[request] + count)
        return orders

    def _load_order(self, output: SchedulerOutput, name: str, start: int) -> LoadOrder:
        """A state goes to two blocks: the one of its position, which vLLM may share with other requests, and the one
        of the step's last token, where vLLM expects the running state. It copied the one to the other before the load.
        """
        end = self._tracked[name].end
        last = end + output.num_scheduled_tokens[name]
        block_ids = output.kv_connector_block_state.get_block_ids(name)
        tables = [self._table(table, block_ids, 0, end) for table in self._tables]
        running = [self._table(table, block_ids, 0, last) for table in self._tables]
        both = [
            here._replace(ids=sorted({*here.ids, *there.ids})) if table.is_state else here
            for table, here, there in zip(self._tables, tables, running, strict=True)
        ]
        return LoadOrder(name, start, end, both)

    def _save_step(self, orders: StepOrders, output: SchedulerOutput, name: str, start: int, end: int) -> None:
        tracked = self._tracked.get(name)
        if tracked is None:
            return
        tracked.stored_until = start if tracked.stored_until is None else tracked.stored_until
        points = points_of_step(self._rule, self._catalogue, tracked.request, start, end, tracked.stored_until)
        if not points:
            return
        state = output.kv_connector_block_state
        block_ids = state.get_block_ids(name)
        handed_over = {
            group: block for group, block, position in state.boundary_state_offloads.get(name, ()) if position == end
        }
        orders.saves.append(self._save_order(tracked, points, end, block_ids, handed_over))
        stretches = (point.end for point in points if self._catalogue.ends_stretch(point.end))
        tracked.stored_until = max([tracked.stored_until, *stretches])

    def new(self, request: Request) -> None:
        """Called when vLLM gets a request."""
        if is_keyed(request):
            self._track(request)

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> SaveOrder | None:
        """Return what is saved of the end of a request's reply, or None if nothing is."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        self._end_fetch(tracked)
        if not self._settings.saves or request.status not in _SAVED_ENDS:
            return None
        points = points_of_end(self._rule, self._catalogue, request, tracked.stored_until or 0)
        if not points:
            return None
        return self._save_order(tracked, points, request.num_computed_tokens, block_ids, {})

    def order_end(self, end: SaveOrder) -> None:
        """Let the workers save the end of a reply in the next step."""
        self._orders.endings.append(end)

    def _save_order(
        self,
        tracked: Tracked,
        points: Sequence[DumpPoint],
        end: int,
        block_ids: Sequence[Sequence[int]],
        handed_over: dict[int, int],
    ) -> SaveOrder:
        first = min(self._catalogue.first_stored(point.end) for point in points)
        tables = [self._table(table, block_ids, first, end) for table in self._tables]
        keys = tracked.tokens.at([point.end for point in points])
        return SaveOrder(tracked.request.request_id, points, keys, tables, end, handed_over)

    def _table(self, table: Table, block_ids: Sequence[Sequence[int]], first: int, end: int) -> BlockTable:
        """Blocks of the tokens from `first` on; of states the one that has the state at `end`."""
        ids, last = block_ids[table.number], (end - 1) // table.block_tokens
        start = last if table.is_state else first // table.block_tokens
        return BlockTable(start, list(ids[start : last + 1]))

    def reset(self) -> None:
        """Forget all that is stored: the weights may have changed. Objects get names that no other engine has.

        Nothing more is saved of running requests: some of their KV is of the old weights.
        """
        for tracked in self._tracked.values():
            self._end_fetch(tracked)
        self._tracked = {}
        self.identity = f"{self._base_identity} reset {token_hex(8)}"
        self._catalogue.identify(self.identity)
        self._orders.identity = self.identity

    def close(self) -> None:
        self._finder.close(2.0)
        release(self._urls)
