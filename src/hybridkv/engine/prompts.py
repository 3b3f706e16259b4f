"""Prompts: token ids, packed and checked once. All later code uses the same int32 buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hybridkv.cache.tokens import TOKEN_BYTES, pack_tokens
from hybridkv.errors import InputError, RequestError

TokenIdList: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor


@dataclass(frozen=True, slots=True)
class Ids:
    """Packed token ids, and their range, which is checked against a model's vocabulary."""

    packed: bytes
    """int32, little-endian."""
    lowest: int
    highest: int
    """`lowest` and `highest` are 0 if there are no ids."""

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def as_array(self) -> npt.NDArray[np.int32]:
        """A view, not a copy."""
        return np.frombuffer(self.packed, dtype=np.int32)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Prompt:
    """Token ids, and breakpoints: positions worth a checkpoint because other prompts may diverge there."""

    ids: Ids
    breakpoints: tuple[int, ...]
    lifetimes: tuple[tuple[int, float], ...]
    """Breakpoints that the caller would like to have kept for so many seconds: a hint for retention."""

    def __init__(
        self,
        token_ids: TokenIdList | Ids,
        breakpoints: Sequence[int] | npt.NDArray[Any] = (),
        lifetimes: Mapping[int, float] | None = None,
    ) -> None:
        """`token_ids`: a list, an array or a tensor of whole numbers; or the `ids` of another prompt.

        `lifetimes`: by breakpoint, seconds that the caller would like to have it kept: a hint, no promise.
        """
        ids = token_ids if isinstance(token_ids, Ids) else _ids_of(token_ids)
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "breakpoints", _checked_breakpoints(breakpoints, ids.num_tokens))
        object.__setattr__(self, "lifetimes", _checked_lifetimes(lifetimes or {}, self.breakpoints))

    @property
    def token_ids(self) -> list[int]:
        """The ids as a new list."""
        ids: list[int] = self.ids.as_array().tolist()
        return ids

    @property
    def num_tokens(self) -> int:
        return self.ids.num_tokens

    def __repr__(self) -> str:
        return f"Prompt(token_ids={self.token_ids}, breakpoints={list(self.breakpoints)})"


def on_host(ids: Any) -> Any:
    """Integer tensors and arrays become an array, other tensors and arrays a list. All else is returned unchanged."""
    if isinstance(ids, Tensor):
        ids = ids.tolist() if ids.is_floating_point() or ids.is_complex() else ids.numpy(force=True)
    if isinstance(ids, np.ndarray) and (ids.dtype.kind not in "iu" or not ids.ndim):
        return ids.tolist()
    return ids


def pack_ids(token_ids: Sequence[int] | npt.NDArray[Any], param: str | None = None) -> Ids:
    """Pack ids of any kind into one buffer. `param`: the parameter to name in errors."""
    try:
        packed = pack_tokens(_narrow(token_ids) if isinstance(token_ids, np.ndarray) else token_ids)
        lowest, highest = _scan(packed, token_ids)
    except InputError as error:
        raise RequestError(str(error), param) from None
    return Ids(packed, lowest, highest)


def _narrow(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert integers of any width to int32. Other arrays are returned unchanged: packing refuses them."""
    if ids.dtype.kind not in "iu" or ids.dtype == np.dtype("<i4"):
        return ids
    narrow = ids.astype("<i4")
    if (narrow != ids).any():
        bad = ids[narrow != ids].flat[0]
        raise InputError(f"token ids must be integers that fit into 32 bits: {bad} does not")
    return narrow


def _scan(packed: bytes, token_ids: Sequence[int] | npt.NDArray[Any]) -> tuple[int, int]:
    """The lowest and the highest id. Refuses booleans, which are packed as 0 or 1."""
    ids = np.frombuffer(packed, dtype=np.int32)
    if not isinstance(token_ids, (bytes, bytearray, np.ndarray)):  # these types hold no booleans
        for position in np.flatnonzero(ids < 2).tolist():
            if type(token_ids[position]) is bool:
                what = f"token id {token_ids[position]} at position {position}"
                raise InputError(f"{what}: a boolean is no id; pass whole numbers")
    return (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)


def _ids_of(token_ids: Any) -> Ids:
    ids = on_host(token_ids) if isinstance(token_ids, Tensor) else token_ids
    if isinstance(ids, str) or not isinstance(ids, (Sequence, np.ndarray)):
        raise RequestError(f"a Prompt of type {type(token_ids).__name__}: it has token ids; pass a list", "prompt")
    return pack_ids(ids, "prompt")


def _checked_breakpoints(breakpoints: Any, num_tokens: int) -> tuple[int, ...]:
    if isinstance(breakpoints, (str, bytes)) or not isinstance(breakpoints, (Sequence, np.ndarray)):
        kind = type(breakpoints).__name__
        raise RequestError(f"breakpoints of type {kind}: pass a list of positions in the prompt", "breakpoints")
    for position in breakpoints:
        if isinstance(position, bool) or not isinstance(position, (int, np.integer)) or position < 0:
            raise RequestError(f"breakpoint {position!r}: pass a number of tokens of the prompt", "breakpoints")
        if position > num_tokens:
            raise RequestError(
                f"breakpoint {position} of a prompt of {num_tokens} tokens: choose 0 to {num_tokens}", "breakpoints"
            )
    return tuple(map(int, breakpoints))


def _checked_lifetimes(lifetimes: Mapping[int, float], breakpoints: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    for position, seconds in lifetimes.items():
        if position not in breakpoints:
            raise RequestError(f"lifetime of {position!r}, which is no breakpoint: name it as one", "lifetimes")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise RequestError(f"lifetime {seconds!r} of breakpoint {position}: pass seconds above 0", "lifetimes")
    return tuple(sorted((int(position), float(seconds)) for position, seconds in lifetimes.items()))
