"""The worker's half: reads objects into host memory, copies them into vLLM's blocks, and saves what layers compute.

No load can fail inside a forward pass: a hit is announced only when all its bytes have been read and verified.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.integrations.vllm.catalogue import BLOCK_TOKENS, make_catalogue
from hybridkv.integrations.vllm.copying import copies
from hybridkv.integrations.vllm.groups import known_layers
from hybridkv.integrations.vllm.memory import BlockMemory
from hybridkv.integrations.vllm.messages import FetchOrder, SaveOrder, StepOrders, WorkerReport
from hybridkv.integrations.vllm.model import model_spec
from hybridkv.integrations.vllm.pages import FetchedPages, TablePages
from hybridkv.integrations.vllm.placement import BEFORE_ALL_LAYERS, place
from hybridkv.integrations.vllm.settings import Settings
from hybridkv.stream import Load, Mover, PageRequest, StepTransfers, StreamStats

_IDLE_WAIT_S = 0.005
"""A step that computes nothing waits this long for a fetch to end, instead of spinning."""


class WorkerHalf:
    """Called on the worker's thread, step by step."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
        self.stats = StreamStats()
        self.counts: Counter[str] = Counter()
        """Empty: the scheduler's half counts requests."""
        self._config = config
        self._settings = settings
        self._model = model_spec(config, kv_cache_config, get_tensor_model_parallel_rank())
        self._layers = known_layers(kv_cache_config, self._model, BLOCK_TOKENS)
        self._tables = {known.table.name: known.table for known in self._layers.values()}
        self._memory: BlockMemory | None = None
        self._fetches: dict[str, tuple[Load, FetchedPages]] = {}
        """Fetches under way, and those that have ended well and wait for blocks."""
        self._reported: set[str] = set()
        self._ended = threading.Event()
        """Set when a fetch has ended."""
        self._orders: StepOrders | None = None
        self._step: StepTransfers | None = None
        self._copies: dict[int, list[Future[None]]] = {}
        """Copies into blocks, by the layer that needs them."""
        self._saved: set[str] = set()
        """Finished requests whose blocks are not needed any more."""

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises InputError for tensors that are not what the specs say."""
        modules = self._config.compilation_config.static_forward_context
        catalogue = make_catalogue(self._model)
        buffers = place(catalogue, self._layers, tensors, modules)
        self._memory = BlockMemory(catalogue, buffers, self._settings, self.stats, self._ended.set)

    # --- the beginning of a step --------------------------------------------------------------------------------------

    def begin(self, orders: StepOrders) -> None:
        """Called before a step's forward pass, if it has one."""
        assert self._memory is not None
        self._orders = orders
        mover = self._memory.mover(orders.identity)
        for request in orders.drops:
            self._drop(request)
        for fetch in orders.fetches:
            self._fetch(mover, fetch)
        if not orders.saves:
            return
        self._step = mover.step()
        for order in orders.saves:
            for outgoing in mover.dump(self._save_request(order), order.points, order.keys):
                self._step.add(order.request, outgoing)

    def load(self) -> None:
        """Called before the forward pass if the step has loads. States are complete on return."""
        assert self._memory is not None
        assert self._orders is not None
        orders, self._orders.loads = self._orders.loads, []
        if not orders:
            return
        tasks: list[tuple[int, Callable[[], None]]] = []
        for order in orders:
            _, fetched = self._fetches[order.request]
            for chunk, parts in fetched.chunks.items():
                tasks += copies(self._memory.pages, self._tables[chunk.table], order, chunk, parts)
            self._drop(order.request)
        self._memory.copier.submit(self._memory.pages.order())
        for layer, copy in sorted(tasks, key=lambda task: task[0]):
            self._copies.setdefault(layer, []).append(self._memory.copier.submit(copy))
        self.wait_for(BEFORE_ALL_LAYERS)
        if not self._settings.layerwise:
            for layer in list(self._copies):
                self.wait_for(layer)

    def wait_for(self, layer: int) -> None:
        """Wait until everything that a layer needs is in its blocks."""
        for copied in self._copies.pop(layer, ()):
            copied.result()

    def wait_for_layer(self, name: str) -> None:
        if self._copies:
            self.wait_for(extract_layer_index(name))

    # --- during and after a step --------------------------------------------------------------------------------------

    def layer_ran(self, name: str) -> None:
        if self._step is not None and self._settings.layerwise:
            self._step.after_layer(extract_layer_index(name))

    def end(self) -> None:
        """Called after the forward pass. Copies everything that is saved out of vLLM's blocks.

        If the forward pass has raised, nothing of the step is stored.
        """
        assert self._memory is not None
        has_failed = sys.exc_info()[0] is not None
        for layer in list(self._copies):
            self.wait_for(layer)
        step, self._step = self._step, None
        if step is not None:
            if not has_failed:
                step.after_last_layer()
                step.finish()
                for order in self._orders.saves if self._orders else ():
                    step.judge(order.request, True)
            step.publish()
        if self._orders is not None and not has_failed:
            for order in self._orders.endings:
                self.save_end(self._orders.identity, order)
                self._saved.add(order.request)
            self._memory.mover(self._orders.identity).settle()

    def save_end(self, identity: str, order: SaveOrder) -> None:
        """Copy the end of a finished request out of its blocks, which may be overwritten by steps that come later."""
        assert self._memory is not None
        self._memory.mover(identity).dump_now(self._save_request(order), order.points, order.keys)

    def take_saved(self) -> set[str]:
        saved, self._saved = self._saved, set()
        return saved

    def report(self) -> WorkerReport | None:
        """Fetches that have ended since the last call."""
        if self._orders is not None and self._orders.is_idle and self._waits_for_fetches:
            self._ended.wait(_IDLE_WAIT_S)
        self._ended.clear()
        report = WorkerReport()
        for request, (load, _) in list(self._fetches.items()):
            load.expire()
            if request in self._reported or not load.is_over:
                continue
            assert self._memory is not None
            self._memory.ended(load)
            self._reported.add(request)
            report.fetched[request] = [load.failure is None]
            if load.failure is not None:
                self._drop(request)
        self._orders = None
        return report if report.fetched else None

    @property
    def _waits_for_fetches(self) -> bool:
        return len(self._reported) < len(self._fetches)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # --- fetches ------------------------------------------------------------------------------------------------------

    def _fetch(self, mover: Mover, order: FetchOrder) -> None:
        assert self._memory is not None
        blocks = range(-(-order.end // BLOCK_TOKENS))
        request = PageRequest(
            order.start,
            order.end,
            {name: blocks for name, table in self._tables.items() if not table.is_state},
            {name: {order.end: [0]} for name, table in self._tables.items() if table.is_state},
        )
        fetched = FetchedPages(self._memory.pages)
        self._fetches[order.request] = mover.load(request, order.keys, fetched), fetched

    def _drop(self, request: str) -> None:
        load, _ = self._fetches.pop(request, (None, None))
        self._reported.discard(request)
        if load is not None and not load.is_over:
            load.give_up("aborted", RuntimeError("the request ended"))
            assert self._memory is not None
            self._memory.ended(load)

    # --- saves --------------------------------------------------------------------------------------------------------

    def _save_request(self, order: SaveOrder) -> PageRequest:
        blocks: dict[str, TablePages] = {}
        states: dict[str, dict[int, list[int]]] = {}
        for name, table in self._tables.items():
            found = order.tables[table.number]
            if not table.is_state:
                blocks[name] = TablePages(found, table.block_tokens // BLOCK_TOKENS)
                continue
            block = order.states.get(table.number, found.ids[-1] if found.ids else 0)
            states[name] = {order.state_at: [block]} if block else {}
        return PageRequest(0, order.state_at, blocks, states)
