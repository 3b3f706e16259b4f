"""Runs packed steps: the next tokens of all requests in one row, through a stock model, on pages.

The runner knows only the tables and tokens of requests, and makes no scheduling decisions.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hybridkv.cache import CacheLayout, StepTables
from hybridkv.engine.adapters.adapters import Adapters, NamedAdapter
from hybridkv.engine.compiling import CompiledLayers, compile_layers
from hybridkv.engine.decoding.decoder import Decoded, Decoder
from hybridkv.engine.decoding.step_buffer import Moved, Row, RowViews, StepBuffer
from hybridkv.engine.loading.decoder_layers import find_layers
from hybridkv.engine.seams import Frame, PagedCache, attach
from hybridkv.engine.seams.frame import running
from hybridkv.engine.tables import TableMaker
from hybridkv.engine.taps import Taps
from hybridkv.errors import ConfigError, HybridKVError
from hybridkv.kernels.spans import Span
from hybridkv.memory import Memory, Uploader

LOG = logging.getLogger("hybridkv.engine")


class Work(NamedTuple):
    """One request's part of a step."""

    tokens: npt.NDArray[np.int32]
    """The tokens from `tables.start` to `tables.end`."""
    tables: StepTables
    wants_logits: bool
    """Whether a token is sampled after the last one."""
    adapter: str | None = None
    """The name of the adapter that computes the tokens; None: the model alone."""


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
        self._layout = layout
        decoder, layers = find_decoder(model)
        self._tables = TableMaker(model, layers, memory, layout, self.uploader)
        self._adapters: Adapters | None = None
        self.num_layers = len(layers)
        self.taps = Taps(decoder, layers, memory, self.uploader)
        self._cache = PagedCache()
        self._hooks: list[Any] = []
        self._wanted: list[Callable[[], bool]] = []
        """Whether each observer must be called in the step that is about to run."""
        self.decoder: Decoder | None = None
        """Runs decoding steps, if they do not run as other steps."""
        self._frame: Frame | None = None
        self._compiled: CompiledLayers | None = None
        attach(model)
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = next((name for name in ("past_key_values", "cache_params") if name in accepted), "")
        self._selects_logits = "logits_to_keep" in accepted
        if not self._cache_argument or not (self._selects_logits or model.get_output_embeddings()):
            raise ConfigError(f"{type(model).__name__} takes no cache or cannot select logits: it cannot be served")
        self._kept: torch.Tensor | None = None
        """Tokens of this step whose logits are computed, in models that do not select them; None: all."""
        if not self._selects_logits:
            model.get_output_embeddings().register_forward_pre_hook(self._select)
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
        adapters = None if self._adapters is None else self._adapters.step(spans, [one.adapter for one in work])
        frame = Frame(self.memory, step["positions"], step["shifts"], tables, adapters)
        self._frame = frame
        try:
            return self._forward(frame, step["tokens"], step["last"])
        finally:
            self._frame = None
            self.taps.end()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def decode(self, rows: Sequence[Row]) -> Decoded:
        """Submit a step of one token a row. `can_decode` must be true."""
        assert self.decoder is not None
        return self.decoder.start(rows)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def decode_on(
        self, moved: Moved, tokens: Sequence[int] | None = None, changed: Mapping[int, Row | None] | None = None
    ) -> Decoded:
        """Submit the step after the last one. Without `tokens` the device takes those that it has drawn.

        `changed`: rows that go on in other pages or not at all: see `StepBuffer.follow`.
        """
        assert self.decoder is not None
        if tokens is None:
            return self.decoder.advance(moved)
        return self.decoder.follow(moved, tokens, changed or {})

    @property
    def kernels(self) -> dict[str, str]:
        """Who made the kernels of each kind of step. They are the same whatever else is installed."""
        return {"prefill": "torch", "decode": "torch" if self.decoder is None else "triton"}

    def can_decode(self, steps: Sequence[StepTables]) -> bool:
        """Whether `decode` runs a step of one token a row. Nothing may observe its layers."""
        if self.decoder is None or any(wanted() for wanted in self._wanted):
            return False
        if any(self.taps.is_used(step) for step in steps):
            return False
        return self.decoder.takes(len(steps), max(step.end for step in steps))

    def can_decode_on(self, num_rows: int, num_tokens: int) -> bool:
        """Whether `decode_on` runs the next step. `num_rows`, `num_tokens`: rows that are left, and the longest's."""
        if self.decoder is None or any(wanted() for wanted in self._wanted):
            return False
        return self.decoder.can_follow(num_rows, num_tokens)

    def _forward(self, frame: Frame, tokens: torch.Tensor, logits_to_keep: torch.Tensor | int) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens[None], self._cache_argument: self._cache, "use_cache": False}
        if self._selects_logits:
            inputs["logits_to_keep"] = logits_to_keep
        else:
            self._kept = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else None
        if self._takes_positions:
            inputs["position_ids"] = frame.positions[None]
        with running(frame):
            logits: torch.Tensor = self.model(**inputs).logits[0]
        return logits

    def _select(self, head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Give the head the tokens that it is wanted for. Hidden states are `[1, N, hidden]`."""
        return None if self._kept is None else (args[0][:, self._kept],)

    def use_decoder(self, *, max_rows: int, max_tokens: int) -> None:
        """Run decoding steps of up to `max_rows` requests, of `max_tokens` tokens each, apart from other steps."""
        buffer = StepBuffer(
            self._layout, self._tables.state_keys, self.device, max_rows=max_rows, max_tokens=max_tokens
        )
        self.decoder = Decoder(self._decode, buffer, max_rows=max_rows)

    def capture(self) -> None:
        """Capture decoding steps as CUDA graphs. A model that cannot be captured decodes as in any other step."""
        assert self.decoder is not None
        if self._compiled is not None:
            LOG.info("compiling layers: a minute where torch has not compiled them before, else some seconds")
        try:
            with torch.inference_mode():
                self.decoder.capture()
        except HybridKVError:
            raise
        except Exception as error:  # whatever stock code does that no graph can hold, such as reading a result
            name, reason = type(self.model).__name__, str(error).strip().partition("\n")[0]
            LOG.warning("%s decodes without CUDA graphs: %s: %s", name, type(error).__name__, reason)
            self.decoder = None

    def _decode(self, views: RowViews) -> torch.Tensor:
        """Hooks see no frame: what they do could not be captured."""
        return self._forward(Frame(self.memory, views.positions, views.shifts, views.tables), views.tokens, 0)

    def observe(self, observer: LayerObserver, wants_step: Callable[[], bool] = lambda: True) -> None:
        """Call `observer` for every decoder layer from now on. Without observers there are no hooks, and no cost.

        `wants_step`: whether the step that is about to run needs it. Otherwise it may run without calls: a captured
        step has none.
        """
        self._wanted.append(wants_step)
        for index, layer in enumerate(decoder_layers(self.model)):
            self._hooks.append(layer.register_forward_pre_hook(self._before(observer, index)))
            self._hooks.append(layer.register_forward_hook(self._after(observer, index)))

    def compile(self, wanted: bool | None) -> None:
        """Compile the decoder layers when they next run, if they can be compiled."""
        if wanted is not False:
            self._compiled = compile_layers(self.model, decoder_layers(self.model), wanted, self.device)

    def use_adapters(self, adapters: Mapping[str, NamedAdapter]) -> None:
        """Put adapters on the model. Raises ConfigError if one does not fit. Layers with adapters are not compiled."""
        self._adapters = Adapters(self.model, find_layers(self.model), adapters, self.uploader)

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
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
    """The module that runs the decoder layers, and these."""
    path = find_layers(model)
    return model.get_submodule(path.rpartition(".")[0]), list(model.get_submodule(path))


def _spans(work: Sequence[Work]) -> list[Span]:
    spans, row = [], 0
    for one in work:
        spans.append(Span(row, one.tables.start, one.tables.end))
        row += one.tables.end - one.tables.start
    return spans
