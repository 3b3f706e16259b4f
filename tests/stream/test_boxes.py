"""Pages whose elements lie anywhere at regular distances, as in another engine: every byte, on CPU and GPU."""

from __future__ import annotations

import random

import pytest
import torch

from hybridkv.plan import Row
from hybridkv.spec import DType, Part, Split
from hybridkv.stream.boxes import Axis, PageGrid, Span
from hybridkv.stream.form import Chunk, Field, StoredLayer
from hybridkv.stream.torch_io import page_bytes
from tests.devices import DEVICES

BLOCK = 16
HEADS, DIM, SIZE = 2, 8, 2
NUM_SLABS = 5


class Layout:
    """A random order of (page of a slab, head, token digits, element digits) inside a slab. Elements have two bytes."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.pages = source.choice([1, 3])
        tokens = source.choice([(BLOCK,), (8, 2), (2, 4, 2)])
        elements = source.choice([(DIM,), (4, 2)])
        digits = [("page", self.pages), ("head", HEADS)]
        digits += [(f"t{number}", size) for number, size in enumerate(tokens)]
        digits += [(f"e{number}", size) for number, size in enumerate(elements)]
        source.shuffle(digits)
        stride, strides = SIZE, dict[str, int]()
        for name, size in reversed(digits):
            strides[name] = stride
            stride *= size
        self.slab_bytes = stride + 2 * SIZE  # something between slabs
        token_axes = tuple(Axis(size, strides[f"t{number}"]) for number, size in enumerate(tokens))
        inner = tuple(Axis(size, strides[f"e{number}"]) for number, size in enumerate(elements))
        self.field = Field(SIZE, strides["head"], token_axes, DIM * SIZE, inner, strides["page"])
        self.strides = strides

    @property
    def chunk(self) -> Chunk:
        part = Part("k", (Split.whole(HEADS),), (DIM,), DType.BFLOAT16)
        layer = StoredLayer(0, HEADS, (self.field,), ((part, part.runs[0]),))
        return Chunk(PageGrid(self.slab_bytes, self.pages, 7), "table", Row((0,), 0, 0, 0, ()), 0, (layer,))

    def place(self, page: int, token: int, head: int, element: int) -> int:
        """The byte where an element lies, digit by digit."""
        slab, number = divmod(page, self.pages)
        place = SIZE + slab * self.slab_bytes + number * self.strides["page"] + head * self.strides["head"]
        for digit, axes in ((token, self.field.token_axes), (element, self.field.inner)):
            for axis in reversed(axes):
                digit, rest = divmod(digit, axis.size)
                place += rest * axis.stride
        return place


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_every_element_goes_where_the_layout_has_it(seed: int, device: str) -> None:
    source, layout = random.Random(seed), Layout(seed)
    chunk, num_pages = layout.chunk, NUM_SLABS * layout.pages
    count = source.randrange(1, num_pages + 1)
    num_tokens = (count - 1) * BLOCK + source.randrange(1, BLOCK + 1)
    numbers = source.sample(range(num_pages), count)
    pages = [None if count > 1 and source.random() < 0.2 else number for number in numbers]
    before = source.randbytes(NUM_SLABS * layout.slab_bytes)
    row = source.randbytes(chunk.nbytes(num_tokens))
    buffer = torch.frombuffer(bytearray(before), dtype=torch.uint8).to(device)
    memory = page_bytes(buffer)

    memory.copy_in(chunk, Span(pages, num_tokens, BLOCK), memoryview(bytearray(row)))
    expected = bytearray(before)
    for token in range(num_tokens):
        page = pages[token // BLOCK]
        for head in range(HEADS):
            for element in range(DIM) if page is not None else ():
                start = ((head * num_tokens + token) * DIM + element) * SIZE
                place = layout.place(page or 0, token % BLOCK, head, element)
                expected[place : place + SIZE] = row[start : start + SIZE]
    assert buffer.cpu().numpy().tobytes() == expected

    whole = Span(numbers, num_tokens, BLOCK)
    memory.copy_in(chunk, whole, memoryview(bytearray(row)))
    copy = memory.copy_out(chunk, whole)
    copy.wait()
    assert bytes(copy.data) == row
