"""The link of an engine, as its core sees it: prompts for others (`prefills`) and prompts of others (`receipts`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridkv.cache import Cache
from hybridkv.engine.linking.prefills import Prefills
from hybridkv.engine.linking.receipts import Receipts
from hybridkv.engine.seams import Frame
from hybridkv.link.link import Link


class Linking:
    """Called on the engine thread, but for what the link calls."""

    def __init__(self, link: Link, cache: Cache, device: torch.device) -> None:
        self.link = link
        self._device = device
        self.prefills = None if link.producer is None else Prefills(link, link.producer, cache, self._settle)
        self.receipts = None if link.consumer is None else Receipts(link.consumer, cache, self._settle)
        self.on_event: Callable[[], None] = _nobody
        """Called on any thread when `tend` has something to do."""
        link.on_change = lambda: self.on_event()
        link.on_release = self._release

    def tend(self) -> None:
        """Unpin what was sent, and free pages that no producer writes to any more."""
        if self.prefills is not None:
            self.prefills.unpin_released()
        if self.receipts is not None:
            self.receipts.settle()

    def wants_step(self) -> bool:
        """Whether the step pushes to other engines."""
        return self.prefills is not None and self.prefills.is_pushing

    def before_layer(self, layer: int, frame: Frame) -> None:
        """Nothing waits here."""

    def after_layer(self, layer: int, frame: Frame, hidden: torch.Tensor) -> None:
        if self.prefills is not None and self._device.type == "cpu":  # on a GPU the layer may not have run yet
            self.prefills.after_layer(layer)

    def _settle(self) -> None:
        """Wait for all work that was submitted to the device. NIXL's writes are not ordered with it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _release(self, request_id: str) -> None:
        if self.prefills is not None:
            self.prefills.released(request_id)
        self.on_event()


def _nobody() -> None:
    """Default of `on_event`: no loop listens."""
