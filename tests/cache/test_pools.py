"""Pages by the hundred take another way than a few: the outcome is the same."""

from __future__ import annotations

import random

import pytest

from hybridkv.cache.arena.compaction import _relocate
from hybridkv.cache.arena.pages import MANY_PAGES, NULL_PAGE, make_pages
from hybridkv.cache.arena.pools import Pool, Slab
from hybridkv.cache.arena.slabs import Arena


@pytest.mark.parametrize("count", [8, MANY_PAGES, MANY_PAGES + 1, 3 * MANY_PAGES])
def test_holds_are_counted_page_by_page(count: int) -> None:
    pool = Arena(64, {"pool": 64}).pools["pool"]
    pool.share_pages(64)
    pages = make_pages(range(64, 64 + count))
    twice, thrice = pages[::2], pages[::4]
    pool.add_holds(twice)
    pool.add_holds(thrice)
    assert set(pool.drop_holds(pages)) == set(pages) - set(twice)
    assert set(pool.drop_holds(twice)) == set(twice) - set(thrice)
    assert list(pool.drop_holds(thrice)) == list(thrice)
    assert not any(pool.holds)


@pytest.mark.parametrize("count", [8, MANY_PAGES, 3 * MANY_PAGES])
def test_pages_given_back_in_any_order_empty_their_slabs(count: int) -> None:
    arena, slabs = Arena(2 * count, {"pool": 8}), set[Slab]()
    pool = arena.pools["pool"]
    pages = list(arena.take(pool, count, slabs))
    random.Random(0).shuffle(pages)
    arena.give_back(pool, pages)
    assert arena.slabs_in_use() == {"pool": 0}
    assert pool.num_free == 0
    arena.check_integrity({})


@pytest.mark.parametrize("num_pages", [5, 32, 33, 200])
@pytest.mark.parametrize("index", [0, 1, 3])
def test_moved_pages_are_replaced_in_tables_of_any_length(num_pages: int, index: int) -> None:
    source, pool = random.Random(num_pages), Pool("pages", 16)
    first = index * 16
    moved = {page: 1000 + page for page in range(first, first + 16) if page != NULL_PAGE}
    before = make_pages(source.choices(range(80), k=num_pages - 2)) + make_pages([first, first + 15])
    table, other = before[:], before[:]
    _relocate([table, None, other], [0, 1], pool.get_slab(index), moved)
    assert table.tolist() == [moved.get(page, page) for page in before]
    assert other == before
