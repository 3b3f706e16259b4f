"""What one layer of one tensor-parallel rank keeps in the cache.

Pure data: no config formats, no addresses, no torch. `models` makes these, `plan` lays them out in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import ClassVar

from hybridkv.errors import InputError, ParallelismError
from hybridkv.sight import EVERYTHING, Sight


class DType(StrEnum):
    """Element types a cache may hold, by their torch names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"

    @property
    def nbytes(self) -> int:
        return _DTYPE_BYTES[self]

    @classmethod
    def parse(cls, text: str) -> DType:
        """The type called `text`: a torch name, with or without "torch.", or a common short form."""
        name = text.strip().lower().removeprefix("torch.")
        try:
            return cls(_DTYPE_ALIASES.get(name, name))
        except ValueError:
            known = ", ".join([*cls, *_DTYPE_ALIASES])
            raise InputError(f"unknown dtype {text!r}: choose one of {known}") from None


_DTYPE_BYTES = {
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT8: 1,
}
_DTYPE_ALIASES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Split:
    """What a rank keeps of a sharded run: `count` of `total` units, from `start` on."""

    total: int
    start: int
    count: int
    unit: int = 1
    """Elements that stay together: those of one head, or of one group of heads."""
    repeats: bool = False
    """With more ranks than units, several ranks keep the same unit. Otherwise there are never more ranks."""

    @property
    def num_units(self) -> int:
        """Units of the whole run."""
        return self.total // self.unit

    def of_units(self, size: int) -> Split:
        """The same part of a run in which each element is `size` elements that stay together."""
        return Split(self.total * size, self.start * size, self.count * size, self.unit * size, self.repeats)

    @classmethod
    def whole(cls, total: int) -> Split:
        """Every rank keeps all of it."""
        return cls(total, 0, total)

    @classmethod
    def even(cls, total: int, tp: int, rank: int, what: str) -> Split:
        """Each of `tp` ranks keeps its own equal part."""
        if total % tp:
            raise ParallelismError(f"tensor-parallel size {tp} does not divide {total} {what}")
        return cls(total, rank * (total // tp), total // tp)

    @classmethod
    def replicated(cls, total: int, tp: int, rank: int, what: str) -> Split:
        """As `even`, but when there are more ranks than units, equally many neighbours keep the same unit."""
        if total >= tp:
            return replace(cls.even(total, tp, rank, what), repeats=True)
        if tp % total:
            raise ParallelismError(f"tensor-parallel size {tp} is no multiple of {total} {what}, nor divides them")
        return cls(total, rank // (tp // total), 1, repeats=True)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor a layer keeps: per token (K, V, latents, hidden states) or once (conv, recurrent state).

    The first axis is the one tensor parallelism cuts. It may be several runs end to end, each cut for itself
    (the conv state of a delta-rule layer is queries, keys and values).
    """

    name: str
    runs: tuple[Split, ...]
    inner: tuple[int, ...]
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(run.count for run in self.runs), *self.inner)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.nbytes


@dataclass(frozen=True, slots=True)
class LayerSpec(ABC):
    """What decoder layer `layer` keeps. One decoder layer may have two specs (attention and state)."""

    kind: ClassVar[str]

    layer: int
    parts: tuple[Part, ...]

    @property
    @abstractmethod
    def group(self) -> str:
        """The group this layer belongs to: layers that share one page table."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts: per token for token kinds, of one whole state for `LinearState`."""
        return sum(part.nbytes for part in self.parts)

    @abstractmethod
    def held_blocks(self, num_tokens: int, block_tokens: int) -> int:
        """The most blocks (or states) that one request of `num_tokens` holds at once."""

    @abstractmethod
    def checkpoint_blocks(self, block_tokens: int) -> int:
        """Blocks (or states) a checkpoint on a block boundary must keep besides full-attention KV."""


@dataclass(frozen=True, slots=True)
class AttentionLayer(LayerSpec):
    """A layer that keeps tokens for as long as later ones see them."""

    @property
    @abstractmethod
    def sight(self) -> Sight:
        """Which tokens a token sees in this layer."""

    def held_blocks(self, num_tokens: int, block_tokens: int) -> int:
        return self.sight.held_blocks(num_tokens, block_tokens)

    def checkpoint_blocks(self, block_tokens: int) -> int:
        return self.sight.checkpoint_blocks(block_tokens)


@dataclass(frozen=True, slots=True)
class FullAttention(AttentionLayer):
    """K and V of every token."""

    kind: ClassVar[str] = "full_attention"

    @property
    def group(self) -> str:
        return "full"

    @property
    def sight(self) -> Sight:
        return EVERYTHING


@dataclass(frozen=True, slots=True)
class LatentAttention(FullAttention):
    """MLA: one compressed latent and one rotary key per token, the same on every rank."""

    kind: ClassVar[str] = "latent_attention"

    @property
    def group(self) -> str:
        return "latent"


@dataclass(frozen=True, slots=True)
class SlidingWindow(AttentionLayer):
    """K and V of the last `window` tokens, the current one included."""

    kind: ClassVar[str] = "sliding_window"

    window: int

    @property
    def group(self) -> str:
        return f"window{self.window}"

    @property
    def sight(self) -> Sight:
        return Sight(window=self.window)


@dataclass(frozen=True, slots=True)
class ChunkedLocal(AttentionLayer):
    """K and V of the current chunk of `chunk` tokens; a token never sees an earlier chunk."""

    kind: ClassVar[str] = "chunked_local"

    chunk: int

    @property
    def group(self) -> str:
        return f"chunk{self.chunk}"

    @property
    def sight(self) -> Sight:
        return Sight(chunk=self.chunk)


@dataclass(frozen=True, slots=True)
class LinearState(LayerSpec):
    """A recurrent state of fixed size: delta rule, state space, lightning or short convolution."""

    kind: ClassVar[str] = "linear_state"

    @property
    def group(self) -> str:
        return "state"

    def held_blocks(self, num_tokens: int, block_tokens: int) -> int:
        return 1 if num_tokens else 0

    def checkpoint_blocks(self, block_tokens: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class HiddenTap(LayerSpec):
    """The hidden state that enters this decoder layer, kept only for requests that ask for it.

    The number of layers stands for the output of the last one, one more for that after the final norm.
    """

    kind: ClassVar[str] = "hidden_tap"

    @property
    def group(self) -> str:
        return "taps"

    def held_blocks(self, num_tokens: int, block_tokens: int) -> int:
        return 0

    def checkpoint_blocks(self, block_tokens: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The cache of one rank of a model: one or two layer specs for each decoder layer that keeps anything."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    dtype: DType
    tp: int
    rank: int
    layers: tuple[LayerSpec, ...]
    source: str
    """Where the numbers come from, for people to read."""
    verified: bool = True
    """False when the numbers are our own record of a published config that nothing here can check."""
    num_mtp_layers: int = 0
    """Number of layers for multi-token prediction whose past is included; their specs follow those of the decoder."""
    has_record: bool = True
    """False if hybridkv knows nothing of the model type: the layer types of the config say what is kept."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes each further token adds for good: full and latent attention."""
        return sum(spec.nbytes for spec in self.layers if isinstance(spec, FullAttention))

    @property
    def local_bytes_per_token(self) -> int:
        """Bytes a token takes in windows and chunks while it is inside them."""
        return sum(spec.nbytes for spec in self.layers if isinstance(spec, (SlidingWindow, ChunkedLocal)))

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state over all layers."""
        return sum(spec.nbytes for spec in self.layers if isinstance(spec, LinearState))

    def checkpoint_bytes(self, block_tokens: int) -> int:
        """Bytes needed to resume on a block boundary, besides full-attention KV."""
        return sum(
            spec.nbytes * spec.checkpoint_blocks(block_tokens) * (1 if isinstance(spec, LinearState) else block_tokens)
            for spec in self.layers
        )
