"""The catalogue of a model in vLLM: the same as that of an embedded engine, so that both find each other's objects."""

from __future__ import annotations

from hybridkv.cache import CacheLayout
from hybridkv.errors import InputError
from hybridkv.integrations.vllm.settings import Settings
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.spec import LinearState, ModelSpec
from hybridkv.stream import Catalogue
from hybridkv.units import format_at_least, format_bytes

BLOCK_TOKENS = 16
"""Tokens of a stored block, whatever vLLM's own block is."""
_ENOUGH_CHECKPOINTS = 1024
"""A plan needs memory for some. The catalogue is the same for every size."""
_FAR_STRETCHES = 1024
"""A position in a long prompt: what is stored there of a window is all of it, or all of a stretch."""
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


def refuse_small_buffers(catalogue: Catalogue, settings: Settings) -> None:
    """Raise InputError if no hit fits `staging`, or if a state or a whole stretch of a group does not fit `waiting`."""
    least = catalogue.load_bytes(0, BLOCK_TOKENS)
    if settings.loads and settings.staging_bytes < least:
        raise _too_small("staging", settings.staging_bytes, f"a hit of {BLOCK_TOKENS} tokens takes", least)
    far = _FAR_STRETCHES * catalogue.stretch_blocks * catalogue.block_tokens
    objects = []
    for group in catalogue.groups:
        tokens = catalogue.num_tokens(group, far)
        objects.append((group.nbytes(tokens), "a state takes" if group.is_state else f"{tokens} tokens take"))
    largest, what = max(objects)
    if settings.saves and settings.waiting_bytes < largest:
        raise _too_small("waiting", settings.waiting_bytes, what, largest)


def _too_small(name: str, given: int, what: str, needed: int) -> InputError:
    return InputError(
        f"kv_connector_extra_config: {name} is {format_bytes(given)}, and {what} {format_bytes(needed)} on each rank, "
        f"which would never be cached: set {name} to {format_at_least(needed)} or more"
    )
