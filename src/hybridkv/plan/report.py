"""A plan as plain data: what `hybridkv plan --json` prints. Field names are a public interface."""

from __future__ import annotations

from typing import Any

from hybridkv.plan.plan import GroupPlan, Plan
from hybridkv.plan.uniform import uniform_pack_sizes, uniform_plan
from hybridkv.spec import ModelSpec


def plan_report(plan: Plan, max_model_len: int) -> dict[str, Any]:
    """Everything about a plan, for one rank, with what one uniform page size would cost beside it."""
    model, options = plan.model, plan.options
    return {
        "model": model.name,
        "model_type": model.model_type,
        "source": model.source,
        "verified": model.verified,
        "has_record": model.has_record,
        "num_mtp_layers": model.num_mtp_layers,
        "tp": model.tp,
        "memory_bytes": options.memory_bytes,
        "max_model_len": max_model_len,
        "block_tokens": options.block_tokens,
        "attn_pack_size": options.attn_pack_size,
        "row_layers": options.row_layers,
        "row_order": options.row_order,
        "slab_bytes": plan.slab_bytes,
        "num_slabs": plan.num_slabs,
        "arena_bytes": plan.arena_bytes,
        "padding_ratio": plan.padding_ratio,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "local_bytes_per_token": model.local_bytes_per_token,
        "state_bytes": model.state_bytes,
        "checkpoint_bytes": model.checkpoint_bytes(options.block_tokens),
        "checkpoint_equals_tokens": checkpoint_tokens(plan),
        "request_bytes": plan.request_bytes(max_model_len),
        "max_requests": plan.max_requests(max_model_len),
        "groups": [_group_report(group) for group in plan.groups],
        "uniform": _uniform_report(plan, max_model_len),
    }


def layer_words(model: ModelSpec) -> str:
    """Return how many layers a plan is of, for people to read."""
    if not model.num_mtp_layers:
        return f"{model.num_layers} layers"
    return f"{model.num_layers} layers and {model.num_mtp_layers} for multi-token prediction"


def unknown_words(model: ModelSpec) -> str:
    """Return the warning of a plan of an unknown model type; empty if hybridkv has a record of the type."""
    if model.has_record:
        return ""
    return f"Unknown model type {model.model_type!r}: this plan is read from the layer types of its config"


def checkpoint_tokens(plan: Plan) -> int | None:
    """How many tokens of full-attention KV one checkpoint weighs; None where nothing grows with the tokens."""
    per_token = plan.model.kv_bytes_per_token
    return round(plan.model.checkpoint_bytes(plan.options.block_tokens) / per_token) if per_token else None


def _group_report(group: GroupPlan) -> dict[str, Any]:
    return {
        "name": group.name,
        "kind": group.kind,
        "layers": list(group.layers),
        "page_bytes": group.page_bytes,
        "stride_bytes": group.stride_bytes,
        "pages_per_slab": group.pages_per_slab,
        "pages_per_item": group.layout.pages,
        "padding_ratio": group.padding_ratio,
        "rows": [
            {"layers": list(row.layers), "page": row.page, "offset_bytes": row.offset_bytes, "nbytes": row.nbytes}
            for row in group.rows
        ],
    }


def _uniform_report(plan: Plan, max_model_len: int) -> dict[str, Any]:
    memory = plan.options.memory_bytes
    by_size = {name: uniform_plan(plan.model, memory, size) for name, size in uniform_pack_sizes(plan.model).items()}
    unpacked = by_size["1"]
    return {
        "block_tokens": unpacked.block_tokens,
        "padding_ratio": unpacked.padding_ratio,
        "max_requests": unpacked.max_requests(max_model_len),
        "by_pack_size": {name: uniform.block_tokens for name, uniform in by_size.items()},
        "pack_sizes": [
            {
                "name": name,
                "pack_size": uniform.pack_size,
                "block_tokens": uniform.block_tokens,
                "page_bytes": uniform.page_bytes,
                "padding_ratio": uniform.padding_ratio,
                "request_bytes": uniform.request_bytes(max_model_len),
                "max_requests": uniform.max_requests(max_model_len),
            }
            for name, uniform in by_size.items()
        ],
    }
