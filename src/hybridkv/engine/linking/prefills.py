"""Prompts that are computed here for other engines: pins, offers, and rows that leave while later layers compute.

A prompt is offered when its request has ended: its pages are pinned until the link releases them. If its consumer has
claimed it before that, each step pushes the blocks that it completes, row by row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridkv.cache import NULL_PAGE, Cache, Pin, StepTables
from hybridkv.engine.linking.handover import first_tokens, prompt_of
from hybridkv.engine.request import Request, Sample
from hybridkv.errors import RequestError
from hybridkv.link import params as transfer_params
from hybridkv.link.errors import LinkError, LinkMismatch
from hybridkv.link.link import Link
from hybridkv.link.params import RemoteDecode
from hybridkv.link.producer import Claim, Outbound, Producer
from hybridkv.link.push import LayerParcels, Push
from hybridkv.link.runs import PageTables

_ALL_LAYERS = 1 << 30


@dataclass(slots=True, eq=False)
class Prefill:
    """One such request."""

    outbound: Outbound
    sent_to: int = 0
    """Tokens before this position were pushed by earlier steps."""
    is_lost: bool = False
    """A step that was pushed did not count."""


class Prefills:
    """Called on the engine thread, but for `released`."""

    def __init__(self, link: Link, producer: Producer, cache: Cache, settle: Callable[[], None]) -> None:
        """`settle`: waits until all pages have what was computed."""
        self._link = link
        self._producer = producer
        self._cache = cache
        self._settle = settle
        self._pins: dict[str, Pin] = {}
        self._released: deque[str] = deque()
        """Requests whose pages need no pin any more."""
        self._step: list[LayerParcels] = []

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def begin(self, request: Request, remote: RemoteDecode) -> Prefill:
        try:
            return Prefill(self._producer.begin(remote.request_id, prompt_of(request)))
        except LinkError as error:
            raise RequestError(str(error), transfer_params.FIELD) from error

    def offer(self, request: Request, prefill: Prefill) -> None:
        """The request has ended: offer its prompt, or withdraw it if it was not computed to its end."""
        outbound = prefill.outbound
        if any(sample.finish_reason not in ("stop", "length") for sample in request.samples):
            self._producer.withdraw(outbound, "the prompt was not computed")
            return
        key = request.key._replace(taps=request.tapped.groups)
        is_pushed = outbound.push is not None
        pin = self._cache.pin(
            request.prompt.ids.packed, math.inf, key, limit=request.prompt_tokens, packs=not is_pushed
        )
        if pin.num_tokens < request.prompt_tokens or prefill.is_lost:
            self._cache.unpin(pin)
            self._producer.withdraw(outbound, "no room to keep the end of the prompt")
            return
        self._pins[outbound.request_id] = pin
        self._keep_to_share()
        request.kv_transfer_params = transfer_params.answer(self._link, outbound.request_id, request.prompt_tokens)
        self._settle()
        self._producer.offer(outbound, PageTables(pin.pages.tables, pin.pages.states), first_tokens(request))

    def _keep_to_share(self) -> None:
        """Give up prompts that wait until all of them have their share of the arena, or only the newest is left."""
        most = self._link.options.offer_share * self._cache.layout.num_slabs
        while self._cache.pinned_slabs(self._pins.values()) > most and self._withdraw_oldest("share"):
            pass

    def released(self, request_id: str) -> None:
        """The link does not need the pages of a request any more. Called on any thread."""
        self._released.append(request_id)

    def unpin_released(self) -> None:
        while self._released:
            pin = self._pins.pop(self._released.popleft(), None)
            if pin is not None:
                self._cache.unpin(pin)

    def withdraw_oldest(self) -> bool:
        """Give up the prompt that has waited longest for its consumer, because there is no room. False: none waits."""
        return self._withdraw_oldest("room")

    def _withdraw_oldest(self, kind: str) -> bool:
        if not self._producer.withdraw_oldest(kind):
            return False
        self.unpin_released()
        return True

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: Sequence[tuple[Sample, StepTables]]) -> None:
        """Collect the parcels of a step that is about to run."""
        self._step = []
        for sample, tables in scheduled:
            prefill = sample.request.prefill
            if prefill is None or prefill.is_lost or sample.index or sample.token_ids:
                continue
            push = self._producer.start_early(prefill.outbound)
            claim = prefill.outbound.claim
            if push is not None and claim is not None:
                self._add(push, claim, prefill, tables, sample.request.prompt_tokens)

    def _add(self, push: Push, claim: Claim, prefill: Prefill, tables: StepTables, prompt_tokens: int) -> None:
        is_last = tables.end == prompt_tokens
        whole = math.lcm(tables.block_tokens, claim.target.cutter.target.block_tokens)
        start, end = max(prefill.sent_to, claim.start), tables.end if is_last else tables.end // whole * whole
        if end <= start and not is_last:
            return
        states = {name: segments[-1].dst for name, segments in tables.segments.items()} if is_last else {}
        wanted = claim.pages if is_last else PageTables(claim.pages.tables, {})
        first, last = start // tables.block_tokens, -(-end // tables.block_tokens)
        named = {name: _only(pages, first, last) for name, pages in tables.tables.items()}
        try:
            self._step.append(push.begin_step(PageTables(named, states), wanted, start, end))
        except LinkMismatch as error:
            push.fail(str(error))
            prefill.is_lost = True
        prefill.sent_to = end

    @property
    def is_pushing(self) -> bool:
        return bool(self._step)

    def after_layer(self, layer: int) -> None:
        for parcels in self._step:
            parcels.after_layer(layer)

    def ran(self) -> None:
        """All layers have run."""
        if self._step:
            self._settle()
        self.after_layer(_ALL_LAYERS)
        self._step = []

    def failed(self, sample: Sample) -> None:
        """The last step does not count for this sample: what it pushed is worthless."""
        self._step = []
        prefill = sample.request.prefill
        if prefill is not None and prefill.outbound.push is not None:
            prefill.is_lost = True
            prefill.outbound.push.fail("a step of the prompt failed")


def _only(pages: Sequence[int], first: int, last: int) -> list[int]:
    """The pages of blocks [first, last); none for the others."""
    return [NULL_PAGE] * first + list(pages[first:last])
