"""Builds all tables of a step before the model runs: places of tokens and states, and data that kernels derive from it.

The layers determine what kernels need: `AttentionNeed`, `StateNeed`. This module knows no requests and runs no kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hybridkv.cache import CacheGroup, CacheLayout, StepTables
from hybridkv.engine.loading.quantization import computing_dtype
from hybridkv.kernels.chunks import chunk_tokens
from hybridkv.kernels.decode.tables import DecodeStates, DecodeTokens
from hybridkv.kernels.mamba import MAMBA1_CHUNK_TOKENS
from hybridkv.kernels.segments import SegmentTable, StateNeed, make_segment_table
from hybridkv.kernels.spans import Span
from hybridkv.kernels.table import AttentionNeed
from hybridkv.kernels.tokens import TokenTable, make_token_table
from hybridkv.memory import LayerMemory, Memory, Uploader
from hybridkv.spec import LatentAttention


class StateKey(NamedTuple):
    """Key of a segment table, shared by layers: a state group, and the index of a page among those of its states."""

    group: str
    page: int


class Tables(NamedTuple):
    """All tables of one step, on the device: of a packed step, or of a decoding step."""

    tokens: Mapping[str, TokenTable] | Mapping[str, DecodeTokens]
    """Token tables by token group."""
    segments: Mapping[StateKey, SegmentTable] | Mapping[StateKey, DecodeStates]


class TableMaker:
    """Makes the tables of one model on one arena."""

    def __init__(
        self,
        model: PreTrainedModel,
        decoder_layers: Sequence[nn.Module],
        memory: Memory,
        layout: CacheLayout,
        uploader: Uploader,
    ) -> None:
        self._uploader = uploader
        self._groups = layout.token_groups
        self._attention: dict[str, set[AttentionNeed]] = {group.name: set() for group in self._groups}
        self._states: dict[StateKey, set[StateNeed]] = {}
        modules = attention_modules(decoder_layers)
        for layer in memory.tokens.values():
            module = modules.get(layer.spec.layer, next(iter(modules.values())))
            self._attention[layer.group].add(attention_need(layer, module, model))
        for layer in memory.states.values():
            self._states.setdefault(StateKey(layer.group, layer.page), set()).add(state_need(layer, memory.device))

    @property
    def state_keys(self) -> Sequence[StateKey]:
        return list(self._states)

    def make(self, spans: Sequence[Span], steps: Sequence[StepTables]) -> Tables:
        """steps[i]: the cache's tables of span i"""
        return Tables(
            {group.name: self._tokens(group, spans, steps) for group in self._groups},
            {key: self._segments(key, spans, steps) for key in self._states},
        )

    def _tokens(self, group: CacheGroup, spans: Sequence[Span], steps: Sequence[StepTables]) -> TokenTable:
        table = make_token_table(
            spans,
            [step.tables[group.name] for step in steps],
            block_tokens=steps[0].block_tokens,
            uploader=self._uploader,
            name=f"tokens.{group.name}",
            sight=group.sight,
        )
        for need in self._attention[group.name]:
            table.prepare(need)
        return table

    def _segments(self, key: StateKey, spans: Sequence[Span], steps: Sequence[StepTables]) -> SegmentTable:
        table = make_segment_table(
            spans,
            [step.segments[key.group] for step in steps],
            page=key.page,
            uploader=self._uploader,
            name=f"segments.{key.group}.{key.page}",
        )
        table.prepare(self._states[key])
        return table


def attention_modules(decoder_layers: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """The attention module of each layer that has one. Modules that several layers share know no number of a layer."""
    found = [
        (index, module)
        for index, layer in enumerate(decoder_layers)
        for module in layer.modules()
        if hasattr(module, "num_key_value_groups")
    ]
    return dict(found) | {module.layer_idx: module for _, module in found if getattr(module, "layer_idx", -1) >= 0}


def attention_need(layer: LayerMemory, module: nn.Module, model: PreTrainedModel) -> AttentionNeed:
    """`module`: the layer's attention. Layers of one model may differ in query heads and in whether they have sinks."""
    config = model.config.get_text_config(decoder=True)
    views = list(layer.parts.values())  # [pages, tokens, heads, dim]
    has_sinks = any(name.endswith("sinks") for name, _ in module.named_parameters())
    is_fused = getattr(config, "attn_logit_softcapping", None) is None and not (
        has_sinks and views[0].device.type != "cpu"
    )
    if not isinstance(layer.spec, LatentAttention):
        return AttentionNeed(computing_dtype(model), module.num_key_value_groups, is_fused, None)
    strides = [view.stride()[:2] for view in views]
    pitches = tuple(sorted({page // token for page, token in strides if page % token == 0}))
    return AttentionNeed(computing_dtype(model), 1, is_fused, pitches)  # the model expands keys for all heads


def state_need(layer: LayerMemory, device: torch.device) -> StateNeed:
    """Convolution states are [C, reach]. Mamba-1 is the only scan whose states have no heads: [C, S]."""
    conv, recurrent = layer.parts.get("conv"), layer.parts.get("recurrent")
    longest = MAMBA1_CHUNK_TOKENS if recurrent is not None and recurrent.dim() == 3 else chunk_tokens(device)
    return StateNeed(None if conv is None else conv.shape[-1], None if recurrent is None else longest)
