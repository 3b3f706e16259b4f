"""The stored form: which bytes an object has. They are the same whatever plan, pack size or row length computed them.

A row of an object has one layer. Its outermost axis is the one that tensor parallelism cuts:

    tokens    head 0 [ K [ all tokens ] V [ all tokens ] ]   head 1 [ .. ]  ..
    states    slice 0 [ its queries, keys, values of the convolution; its recurrent state ]   slice 1 [ .. ]  ..

So a rank holds one contiguous run of the whole row, and the rows of all ranks, end to end, are the row of one rank
alone. A layer is cut into `slices`, as many equal ones as its heads allow, up to 16. An object holds the share that its
writer holds: `state.1of2` is the second half. If several ranks hold the same, such as MLA latents, the first of them
writes it.

docs/store.md describes the form byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.cache import Role
from hybridkv.plan import Row
from hybridkv.sight import Sight
from hybridkv.spec import Part, Split
from hybridkv.stream.boxes import Axis, Box, PageGrid, stack

_READ_ORDER = {Role.STATE: 0, Role.LOCAL: 1, Role.FULL: 2, Role.TAP: 3}
"""Read order of rows that are needed at the same layer."""


class Share(NamedTuple):
    """The slices that one object holds: share `number` of `total` equal ones."""

    number: int
    total: int

    def slices(self, num_slices: int) -> range:
        size = num_slices // self.total
        return range(self.number * size, (self.number + 1) * size)

    def of_group(self, name: str) -> str:
        """Group name of the objects that hold this share."""
        return name if self.total == 1 else f"{name}.{self.number}of{self.total}"


class Field(NamedTuple):
    """A run of a part's first axis, as this rank's pages have it. A row has its pieces at equal distances."""

    page_offset: int
    piece_stride: int
    token_axes: tuple[Axis, ...]
    """The tokens of a block, as of `Box`."""
    nbytes: int
    """Bytes of one piece, for one token."""
    inner: tuple[Axis, ...] = ()
    """The axes of a piece, the outermost first, if its bytes do not lie together in a page. In a row they do."""
    page_stride: int | None = None
    """As of `Box`."""

    def box(self, num_pieces: int, piece_bytes: int, row_offset: int) -> Box:
        """`piece_bytes`: distance of two pieces in the row, which begins with this field's at `row_offset`."""
        strides, unit = list[int](), self.nbytes
        for axis in self.inner:
            unit //= axis.size
            strides.append(unit)
        return Box(
            (num_pieces, *(axis.size for axis in self.inner)),
            self.page_offset,
            (self.piece_stride, *(axis.stride for axis in self.inner)),
            row_offset,
            (piece_bytes, *strides),
            self.token_axes,
            self.nbytes,
            unit,
            self.page_stride,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """One layer of a stored group: one row of its objects."""

    layer: int
    num_pieces: int
    """Heads of a token layer, slices of a state."""
    fields: tuple[Field, ...]
    parts: tuple[tuple[Part, Split], ...]
    """For the description: the fields as the model has them."""

    def row_bytes(self, num_tokens: int) -> int:
        return self.num_pieces * num_tokens * sum(one.nbytes for one in self.fields)

    def boxes(self, num_tokens: int) -> list[Box]:
        piece_bytes = num_tokens * sum(one.nbytes for one in self.fields)
        boxes, offset = [], 0
        for one in self.fields:
            boxes.append(one.box(self.num_pieces, piece_bytes, offset))
            offset += num_tokens * one.nbytes
        return stack(boxes)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Layers of a stored group that lie in one row of a page. They are loaded and dumped together."""

    grid: PageGrid
    table: str
    """The cache group whose pages hold them."""
    row: Row
    first: int
    """Number of the first layer's row in objects."""
    layers: tuple[StoredLayer, ...]
    _boxes: dict[int, list[Box]] = field(default_factory=dict, repr=False)

    def nbytes(self, num_tokens: int) -> int:
        return sum(layer.row_bytes(num_tokens) for layer in self.layers)

    def pieces(self, num_tokens: int) -> Iterator[tuple[int, slice]]:
        """The row number in objects of each layer, and its place among the bytes of the chunk."""
        start = 0
        for number, layer in enumerate(self.layers, self.first):
            end = start + layer.row_bytes(num_tokens)
            yield number, slice(start, end)
            start = end

    def boxes(self, num_tokens: int) -> list[Box]:
        """All bytes of the chunk, in the order of `pieces`."""
        found = self._boxes.get(num_tokens)
        if found is None:
            by_layer, start = [], 0
            for layer in self.layers:
                by_layer.append([box.moved(start) for box in layer.boxes(num_tokens)])
                start += layer.row_bytes(num_tokens)
            found = [box for boxes in zip(*by_layer, strict=True) for box in stack(boxes)]
            self._boxes[num_tokens] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class StoredGroup:
    """Layers of one kind that are cut into equally many slices, in all their objects."""

    name: str
    role: Role
    sight: Sight
    slices: int
    share: Share
    """What this rank holds."""
    is_writer: bool
    """Whether this rank writes its share. If several ranks hold the same, the first does."""
    layers: tuple[StoredLayer, ...]
    chunks: tuple[Chunk, ...]

    @property
    def is_state(self) -> bool:
        return self.role is Role.STATE

    @property
    def read_order(self) -> int:
        return _READ_ORDER[self.role]

    @property
    def ways(self) -> list[list[Share]]:
        """How the slices may have been divided among writers: this rank's way first. Each way covers all slices."""
        totals = [total for total in range(1, self.slices + 1) if self.slices % total == 0]
        totals.sort(key=lambda total: (total != self.share.total, total))
        return [[Share(number, total) for number in range(total)] for total in totals]

    def row_bytes(self, num_tokens: int, share: Share | None = None) -> list[int]:
        """Bytes of each row of an object that holds `share`; by default this rank's."""
        total = (share or self.share).total
        return [layer.row_bytes(num_tokens) * self.share.total // total for layer in self.layers]

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of this rank's rows."""
        return sum(layer.row_bytes(num_tokens) for layer in self.layers)
