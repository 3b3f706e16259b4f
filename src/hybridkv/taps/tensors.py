"""The tensors of one sample: how hidden states are stored, and what a sample must look like.

hidden_states         [tokens, layers, hidden]   bf16, fp32 or fp8 (e4m3)
hidden_states_scales  [tokens, layers, 1]        float32, for fp8 only: the values are hidden_states * scales
token_ids             [tokens]                   int64
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.errors import InputError

HIDDEN_STATES = "hidden_states"
SCALES = "hidden_states_scales"
TOKEN_IDS = "token_ids"

STORED = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = 1e-12
"""Smallest scale of a row: that of a row of zeros, which must not be divided by 0."""


def bytes_per_token(dtype: str, num_layers: int, hidden_size: int) -> int:
    item_bytes: int = STORED[dtype].itemsize
    scale_bytes = 4 if dtype == "fp8" else 0
    return num_layers * (hidden_size * item_bytes + scale_bytes) + 8


def encode(rows: Tensor, token_ids: Tensor, dtype: str) -> dict[str, Tensor]:
    """The tensors to store. Raises InputError if there is not one row a token, or a value is not finite."""
    # rows: [T, L, H], token_ids: [T]
    if rows.ndim != 3 or rows.shape[0] != len(token_ids):
        raise InputError(f"hidden states {list(rows.shape)} of {len(token_ids)} tokens: there must be one row a token")
    shown = torch.bfloat16 if dtype == "fp8" else STORED[dtype]  # what a reader gets
    if not bool(torch.isfinite(rows.to(shown)).all()):
        raise InputError(f"hidden states of {len(token_ids)} tokens have values that are not finite")
    ids = token_ids.to(torch.int64)
    if dtype != "fp8":
        return {TOKEN_IDS: ids, HIDDEN_STATES: rows.to(STORED[dtype])}
    plain = rows.float()
    scales = (plain.abs().amax(-1, keepdim=True) / _LARGEST_FP8).clamp(min=_SMALLEST_SCALE)
    return {TOKEN_IDS: ids, SCALES: scales, HIDDEN_STATES: (plain / scales).to(STORED[dtype])}


def decode(tensors: dict[str, Tensor], dtype: str, num_layers: int, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Hidden states and token ids of stored tensors; fp8 becomes bfloat16. Raises InputError if they do not fit."""
    names = {TOKEN_IDS, HIDDEN_STATES} | ({SCALES} if dtype == "fp8" else set())
    if set(tensors) != names:
        raise InputError(f"it has {', '.join(sorted(tensors))} instead of {', '.join(sorted(names))}")
    ids, rows = tensors[TOKEN_IDS], tensors[HIDDEN_STATES]
    shapes = {
        TOKEN_IDS: (len(ids),),
        HIDDEN_STATES: (len(ids), num_layers, hidden_size),
        SCALES: (len(ids), num_layers, 1),
    }
    kinds = {TOKEN_IDS: torch.int64, HIDDEN_STATES: STORED[dtype], SCALES: torch.float32}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name] or tensor.dtype != kinds[name]:
            raise InputError(
                f"{name} is {list(tensor.shape)} of {tensor.dtype} instead of {list(shapes[name])} of {kinds[name]}"
            )
    if dtype == "fp8":
        rows = (rows.float() * tensors[SCALES]).to(torch.bfloat16)
    if not bool(torch.isfinite(rows).all()):
        raise InputError("it has values that are not finite")
    return rows, ids
