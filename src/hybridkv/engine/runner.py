"""Runs packed steps: the next tokens of all requests in one row, through a stock model, on pages.

The runner knows only the tables and tokens of requests, and makes no scheduling decisions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hybridkv.cache import CacheLayout, StepTables
from hybridkv.engine.compiling import CompiledLayers, compile_layers
from hybridkv.engine.seams import Frame, PagedCache, attach
from hybridkv.engine.seams.frame import running
from hybridkv.engine.tables import TableMaker
from hybridkv.engine.taps import Taps
from hybridkv.errors import ConfigError
from hybridkv.kernels.spans import Span
from hybridkv.memory import Memory, Uploader


class Work(NamedTuple):
    """One request's part of a step."""

    tokens: npt.NDArray[np.int32]
    """The tokens from `tables.start` to `tables.end`."""
    tables: StepTables
    wants_logits: bool
    """Whether a token is sampled after the last one."""


class LayerObserver(Protocol):
    """Called before and after every decoder layer of a step, for example to wait for loads or to start dumps."""

    def before_layer(self, layer: int, frame: Frame) -> None: ...

    def after_layer(self, layer: int, frame: Frame, hidden: torch.Tensor) -> None:
        """The layer's keys, values and states are now in their pages. `hidden`: the layer's output, `[N, hidden]`."""


class Runner:
    """One model on one arena."""

    def __init__(self, model: PreTrainedModel, memory: Memory, layout: CacheLayout) -> None:
        self.model = model
        self.memory = memory
        self.device = memory.device
        self.uploader = Uploader(memory.device)
        self._tables = TableMaker(model, memory, layout, self.uploader)
        decoder, layers = find_decoder(model)
        self.num_layers = len(layers)
        self.taps = Taps(decoder, layers, memory, self.uploader)
        self._cache = PagedCache()
        self._hooks: list[Any] = []
        self._frame: Frame | None = None
        self._compiled: CompiledLayers | None = None
        attach(model)
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = next((name for name in ("past_key_values", "cache_params") if name in accepted), "")
        if not self._cache_argument or "logits_to_keep" not in accepted:
            raise ConfigError(f"{type(model).__name__} takes no cache or cannot select logits: it cannot be served")
        self._takes_positions = "position_ids" in accepted

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def run(self, work: Sequence[Work]) -> torch.Tensor:
        """Run a step. Returns logits `[R, vocab]`, one row for each `Work` with `wants_logits`, in order."""
        tokens = np.concatenate([one.tokens for one in work])
        spans = _spans(work)
        shifts = np.repeat([span.start - span.row for span in spans], [span.length for span in spans])
        last = [span.row + span.length - 1 for span, one in zip(spans, work, strict=True) if one.wants_logits]
        self.uploader.begin()
        positions = np.arange(len(shifts)) + shifts
        step = self.uploader.send("step", tokens=tokens, positions=positions, shifts=shifts, last=last)
        tables = self._tables.make(spans, [one.tables for one in work])
        self.taps.begin(spans, [one.tables for one in work])
        frame = Frame(self.memory, step["positions"], step["shifts"], tables)
        inputs: dict[str, Any] = {
            "input_ids": step["tokens"][None],
            self._cache_argument: self._cache,
            "use_cache": False,
            "logits_to_keep": step["last"],
        }
        if self._takes_positions:
            inputs["position_ids"] = step["positions"][None]
        return self._forward(frame, inputs)

    def _forward(self, frame: Frame, inputs: dict[str, Any]) -> torch.Tensor:
        self._frame = frame
        try:
            with running(frame):
                logits: torch.Tensor = self.model(**inputs).logits[0]
        finally:
            self._frame = None
            self.taps.end()
        return logits

    def observe(self, observer: LayerObserver) -> None:
        """Call `observer` for every decoder layer from now on. Without observers there are no hooks, and no cost."""
        for index, layer in enumerate(decoder_layers(self.model)):
            self._hooks.append(layer.register_forward_pre_hook(self._before(observer, index)))
            self._hooks.append(layer.register_forward_hook(self._after(observer, index)))

    def compile(self, wanted: bool | str) -> None:
        """Compile the decoder layers when they next run, if they can be compiled."""
        if wanted is not False:
            self._compiled = compile_layers(self.model, decoder_layers(self.model), wanted, self.device)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.taps.close()
        if self._compiled is not None:
            self._compiled.stop()

    def _before(self, observer: LayerObserver, index: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            if self._frame is not None:
                observer.before_layer(index, self._frame)

        return hook

    def _after(self, observer: LayerObserver, index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if self._frame is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                observer.after_layer(index, self._frame, hidden[0])

        return hook


def decoder_layers(model: PreTrainedModel) -> Sequence[torch.nn.Module]:
    """The decoder layers of the language model, in order."""
    return find_decoder(model)[1]


def find_decoder(model: PreTrainedModel) -> tuple[torch.nn.Module, Sequence[torch.nn.Module]]:
    """The module that runs the decoder layers, and these. Not every family has a standard place for them."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        is_list = name.endswith("layers") and isinstance(module, torch.nn.ModuleList)
        if is_list and len(module) == count and "vision" not in name and "audio" not in name:
            return model.get_submodule(name.rpartition(".")[0]), list(module)
    raise ConfigError(f"{type(model).__name__} has no list of {count} decoder layers: it cannot be observed")


def _spans(work: Sequence[Work]) -> list[Span]:
    spans, row = [], 0
    for one in work:
        spans.append(Span(row, one.tables.start, one.tables.end))
        row += one.tables.end - one.tables.start
    return spans
