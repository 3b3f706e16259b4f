"""Copies of what was fetched into vLLM's blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from hybridkv.cache import NULL_PAGE
from hybridkv.integrations.vllm.catalogue import BLOCK_TOKENS
from hybridkv.integrations.vllm.groups import Table
from hybridkv.integrations.vllm.messages import LoadOrder
from hybridkv.integrations.vllm.pages import LayerPages, TablePages
from hybridkv.integrations.vllm.placement import BEFORE_ALL_LAYERS
from hybridkv.stream.boxes import Span
from hybridkv.stream.form import Chunk


def copies(
    pages: LayerPages, table: Table, order: LoadOrder, chunk: Chunk, parts: Sequence[tuple[Span, memoryview]]
) -> list[tuple[int, Callable[[], None]]]:
    """The copies of all that was fetched of one chunk into the request's blocks, and the layer that needs each.

    The block that the step writes new tokens to is complete before the first layer: vLLM writes the tokens of a
    layer before it calls the layer's hook, and nothing may change them afterwards.
    """
    blocks, copy = order.tables[table.number], partial(_copy_all, pages, chunk)
    if table.is_state:
        ((_, staged),) = parts
        targets = [(Span([block], 1, 1), staged) for block in blocks.ids if block]
        return [(BEFORE_ALL_LAYERS, partial(copy, targets, ()))]
    per_block = table.block_tokens // BLOCK_TOKENS
    mine, first = TablePages(blocks, per_block), order.start // BLOCK_TOKENS
    written = order.end // table.block_tokens * per_block
    copied = {number for span, _ in parts for number in span.pages if number is not None and number >= first}
    if order.end % BLOCK_TOKENS:
        copied.discard(order.end // BLOCK_TOKENS)  # a part of the last page
    rest = _rest(copied, mine, first, -(-order.end // table.block_tokens), table)
    last = [(_mapped(span, mine, range(max(first, written), len(mine))), staged) for span, staged in parts]
    others = [(_mapped(span, mine, range(first, written)), staged) for span, staged in parts]
    return [(BEFORE_ALL_LAYERS, partial(copy, last, rest)), (chunk.row.first_layer, partial(copy, others, ()))]


def _mapped(span: Span, mine: TablePages, numbers: range) -> Span:
    """A span of a request's blocks as one of pages. Only those with these numbers are kept."""
    pages = [mine[number] if number is not None and number in numbers else NULL_PAGE for number in span.pages]
    return span._replace(pages=[None if page == NULL_PAGE else page for page in pages])


def _rest(copied: Collection[int], mine: TablePages, first: int, num_blocks: int, table: Table) -> list[int]:
    """Pages that are not copied to, of those blocks of vLLM's that are, or that have a part of the last page.

    They are zeroed: what attention masks is multiplied by zero, and what an earlier request has left may be NaN.
    """
    per_block = table.block_tokens // BLOCK_TOKENS
    touched = {number // per_block for number in copied} | {num_blocks - 1}
    pages = [page for block in sorted(touched) for page in range(block * per_block, (block + 1) * per_block)]
    return [mine[page] for page in pages if page >= first and page not in copied and mine[page] != NULL_PAGE]


def _copy_all(pages: LayerPages, chunk: Chunk, parts: Sequence[tuple[Span, memoryview]], rest: Sequence[int]) -> None:
    """`rest`: pages to zero first."""
    if rest:
        pages.zero(chunk, rest, BLOCK_TOKENS)
    for span, staged in parts:
        if any(page is not None for page in span.pages):
            pages.copy_in(chunk, span, staged)
