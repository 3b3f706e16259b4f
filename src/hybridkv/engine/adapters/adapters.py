"""The adapters of one engine: which there are, their keys, and their part of a step.

The stock model stays as it is: a forward hook on each adapted layer adds what the adapters of a step's tokens compute.
In steps without adapters a hook returns at once, and a captured step has nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridkv.cache.tokens import adapter_key
from hybridkv.engine.adapters.fitting import fit
from hybridkv.engine.adapters.reader import Adapter, read_adapter
from hybridkv.engine.seams.frame import AdapterRows, StepAdapters, active
from hybridkv.errors import EngineError, InputError, RequestError
from hybridkv.kernels.spans import Span
from hybridkv.memory import Uploader
from hybridkv.models.checkpoint_digest import adapter_digest
from hybridkv.texts import has_bytes, shown

_LONGEST_NAME = 256
_OF_PAST = frozenset({"kv_b_proj"})
"""Layers that expand the latents of all tokens that a step sees, not of its own alone."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that was read, under its name in this engine."""

    name: str
    adapter: Adapter
    key: str
    """Keeps the KV of its requests apart, in memory, in stores and between engines."""


class _Weights(NamedTuple):
    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[out, rank], scaled"""


def read_adapters(given: Mapping[str, str | Path] | None) -> dict[str, NamedAdapter]:
    """Read adapters by name, before a model is loaded. Raises InputError for a bad name, or a folder that is none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"adapters of type {type(given).__name__}: pass a dictionary of directories by name")
    return {name: _read(name, place) for name, place in given.items()}


def _read(name: object, place: object) -> NamedAdapter:
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME or not has_bytes(name):
        raise InputError(f"adapter name {shown(name)}: choose a text of 1 to {_LONGEST_NAME} whole characters")
    if not isinstance(place, (str, Path)):
        raise InputError(f"adapter {name!r} of type {type(place).__name__}: pass its directory")
    adapter = read_adapter(Path(place))
    return NamedAdapter(name, adapter, adapter_key(name, adapter_digest(Path(place))))


def check_adapter(known: Mapping[str, object], name: str | None) -> None:
    """Refuse the name of an adapter that the engine does not have. None: the request has no adapter."""
    if name is None or (isinstance(name, str) and name in known):
        return
    there = f"this engine has {', '.join(map(repr, known))}" if known else "this engine has none"
    raise RequestError(f"no adapter {shown(name)}: {there}", "adapter")


class Adapters:
    """Adapters on one model. A hook is on each layer that any of them adapts."""

    def __init__(
        self, model: PreTrainedModel, layers_path: str, adapters: Mapping[str, NamedAdapter], uploader: Uploader
    ) -> None:
        """`layers_path`: the path of the decoder layers in the model."""
        self._uploader = uploader
        self._hooks: list[Any] = []
        weights: dict[str, dict[str, _Weights]] = {}
        for one in adapters.values():
            for path, pair in fit(model, layers_path, one.adapter).items():
                up = pair.up.float() * pair.scale
                placed = _Weights(*(side.to(model.device, model.dtype) for side in (pair.down, up)))
                weights.setdefault(path, {})[one.name] = placed
        for path, by_name in weights.items():
            hook = _hook(path, by_name)
            self._hooks.append(model.get_submodule(path).register_forward_hook(hook))

    def step(self, spans: Sequence[Span], names: Sequence[str | None]) -> StepAdapters | None:
        """The adapters of a step. `names[i]`: that of span i. None if no span has one."""
        own: dict[str, list[npt.NDArray[np.int64]]] = {}
        seen: dict[str, list[npt.NDArray[np.int64]]] = {}
        num_seen = 0
        for span, name in zip(spans, names, strict=True):
            if name is not None:
                own.setdefault(name, []).append(np.arange(span.row, span.row + span.length))
                seen.setdefault(name, []).append(np.arange(num_seen, num_seen + span.end))
            num_seen += span.end
        if not own:
            return None
        sent = {
            name: self._uploader.send(f"adapter.{name}", own=np.concatenate(own[name]), seen=np.concatenate(seen[name]))
            for name in own
        }
        return StepAdapters(
            [AdapterRows(name, **rows) for name, rows in sent.items()],
            num_tokens=sum(span.length for span in spans),
            num_seen=num_seen,
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _hook(path: str, weights: Mapping[str, _Weights]) -> Any:
    """A forward hook of one linear layer. x: [..., tokens, in], output: [..., tokens, out]"""
    sees_past = path.rpartition(".")[2] in _OF_PAST

    def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        frame = active()
        if frame is None or frame.adapters is None:
            return
        [x] = args
        count = frame.adapters.num_seen if sees_past else frame.adapters.num_tokens
        if x.shape[-2] != count:
            raise EngineError(f"{path} is run on {list(x.shape)}, not on {count} rows of tokens: no adapter fits there")
        for one in frame.adapters.rows:
            pair = weights.get(one.name)
            if pair is not None:
                rows = one.seen if sees_past else one.own
                output.index_add_(-2, rows, x.index_select(-2, rows) @ pair.down.t() @ pair.up.t())

    return add
