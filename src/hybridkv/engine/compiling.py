"""Compiles decoder layers with torch: one graph a layer, with the seams as opaque operations.

A graph serves all layers of a kind and any number of tokens above 1. Single tokens have a graph of their own, since
torch specializes on sizes of 1. The frame has the number of the running layer, outside the graph; layers differ in
nothing else that a trace would see. Code before and after a layer, such as its observers, is not compiled.

This module knows model families by name only, and does not know what the operations do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from hybridkv.engine.loading.families import COMPILED
from hybridkv.engine.seams.frame import current
from hybridkv.errors import InputError

LOG = logging.getLogger("hybridkv.engine")


def check_compile(compile: bool | None) -> None:
    if not isinstance(compile, bool | None):
        raise InputError(f"compile {compile!r}: pass True or False, or None for a default")


def compile_layers(
    model: PreTrainedModel, layers: Sequence[nn.Module], compile: bool | None, device: torch.device
) -> CompiledLayers | None:
    """Compile a model's decoder layers when they first run. None: on a GPU, if they can be compiled."""
    if compile is False or (compile is None and device.type != "cuda"):
        return None
    reason = _obstacle(model.config.get_text_config(decoder=True).model_type, device)
    if reason is None:
        return CompiledLayers(layers, is_forced=compile is True)
    if compile is True:
        raise InputError(f"compile=True: {reason}; leave it out")
    LOG.warning("layers are not compiled: %s", reason)
    return None


def _drop_capturing_hooks(layers: Sequence[nn.Module]) -> None:
    """Remove the hooks that transformers leaves on a model that was asked for hidden states: they cannot be traced."""
    for module in (module for layer in layers for module in layer.modules()):
        for number, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", "") == output_capturing.__name__:
                del module._forward_hooks[number]


def _obstacle(model_type: str, device: torch.device) -> str | None:
    if model_type not in COMPILED:
        return f"layers of type {model_type!r} cannot be compiled"
    if device.type == "cuda" and not torch.utils._triton.has_triton():
        return "there is no Triton, which torch compiles for GPUs with"
    if device.type == "cpu" and not _has_cpp_compiler():
        return "there is no C++ compiler, which torch compiles for CPUs with"
    return None


def _has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


class CompiledLayers:
    """Layers that run compiled until `stop`, or until the compiler gives up on one of them."""

    def __init__(self, layers: Sequence[nn.Module], *, is_forced: bool) -> None:
        _drop_capturing_hooks(layers)
        self._layers = list(layers)
        self._is_forced = is_forced
        forwards: dict[tuple[Any, ...], Any] = {}
        for index, layer in enumerate(layers):
            kind = tuple((name, type(part)) for name, part in layer.named_modules())
            if kind not in forwards:
                forwards[kind] = _copy(type(layer).forward)
            run = torch.compile(MethodType(forwards[kind], layer), fullgraph=True)
            layer.forward = _CompiledLayer(self, index, layer, run)

    def stop(self) -> None:
        """Run the layers without compilation again."""
        for layer in self._layers:
            vars(layer).pop("forward", None)

    def failed(self, index: int, error: TorchDynamoException) -> None:
        """Called when a layer could not be compiled. No part of it has run."""
        reason = str(error).strip().splitlines()[0]
        if self._is_forced:
            raise InputError(f"compile=True: layer {index} cannot be compiled: {reason}; leave it out") from error
        LOG.warning("layers are not compiled: layer %d cannot be: %s", index, reason)
        self.stop()


class _CompiledLayer:
    """Replaces one layer's `forward`."""

    def __init__(self, owner: CompiledLayers, index: int, layer: nn.Module, run: Any) -> None:
        self._owner, self._index, self._layer, self._run = owner, index, layer, run

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = current()
        frame.attention_layer = frame.state_layer = self._index
        num_tokens = hidden.shape[1]
        if num_tokens > 1:
            _mark_tokens((hidden, args, *kwargs.values()), num_tokens)
        try:
            return self._run(hidden, *args, **kwargs)
        except TorchDynamoException as error:
            self._owner.failed(self._index, error)
            return self._layer.forward(hidden, *args, **kwargs)


def _mark_tokens(values: Sequence[Any], num_tokens: int) -> None:
    """Tell the compiler that the number of tokens changes from step to step. Tensors: [1, N, ...]"""
    for value in values:
        if isinstance(value, Tensor):
            if value.dim() > 1 and value.shape[1] == num_tokens:
                torch._dynamo.mark_dynamic(value, 1)
        elif isinstance(value, (tuple, list)):
            _mark_tokens(value, num_tokens)


def _copy(function: Any) -> FunctionType:
    """A copy of a function with its own code object: torch keeps, counts and looks up graphs by code object."""
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
