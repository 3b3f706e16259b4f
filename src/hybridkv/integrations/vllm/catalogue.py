"""The catalogue of a model in vLLM: the same as that of an embedded engine, so that both find each other's objects."""

from __future__ import annotations

from hybridkv.cache import CacheLayout
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.spec import LinearState, ModelSpec
from hybridkv.stream import Catalogue

BLOCK_TOKENS = 16
"""Tokens of a stored block, whatever vLLM's own block is."""
_ENOUGH_CHECKPOINTS = 1024
"""A plan needs memory for some. The catalogue is the same for every size."""
_SAME_STATES = {"qwen3_next"}
"""Families whose states were compared with those of an embedded engine. Other states are shared between vLLMs only."""


def make_catalogue(model: ModelSpec, identity: str = "") -> Catalogue:
    tokens = BLOCK_TOKENS * (model.kv_bytes_per_token + model.local_bytes_per_token)
    memory = _ENOUGH_CHECKPOINTS * (model.checkpoint_bytes(BLOCK_TOKENS) + tokens)
    plan = make_plan(model, PlanOptions(memory, BLOCK_TOKENS, row_layers=1))
    return Catalogue(plan, CacheLayout.from_plan(plan), identity)


def shared_identity(model: ModelSpec, identity: str) -> str:
    """The identity under which objects are stored."""
    has_states = any(isinstance(spec, LinearState) for spec in model.layers)
    return f"{identity} in vLLM" if has_states and model.model_type not in _SAME_STATES else identity
