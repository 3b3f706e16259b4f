"""The search for holes in windows and taps, on nodes made by hand."""

from __future__ import annotations

from hybridkv.cache.arena.pages import make_pages
from hybridkv.cache.index.resume import NO_HOLE, _first_hole, _last_hole, _start_of_holes
from hybridkv.cache.index.tree import Node, PathNode


def make_path() -> list[PathNode]:
    """Blocks 0-5: pages in 0, 1 and 4; blocks 6-8: no pages at all; blocks 9, 10: both."""
    root = Node(None, 0, bytearray(), [make_pages()])
    first = Node(root, 0, bytearray(), [make_pages([7, 8, 0, 0, 9, 0])])
    second = Node(first, 6, bytearray(), [None])
    third = Node(second, 9, bytearray(), [make_pages([5, 6])])
    return [PathNode(root, 0), PathNode(first, 6), PathNode(second, 3), PathNode(third, 2)]


def test_holes_are_found_from_both_ends() -> None:
    path = make_path()
    assert _last_hole(path, 0, 0, 11) == 8
    assert _last_hole(path, 0, 9, 11) == NO_HOLE
    assert _last_hole(path, 0, 0, 5) == 3
    assert _last_hole(path, 0, 4, 5) == NO_HOLE
    assert _last_hole(path, 0, 3, 3) == NO_HOLE
    assert _first_hole(path, 0, 11) == 2
    assert _first_hole(path, 0, 2) == NO_HOLE


def test_a_run_of_holes_begins_after_the_last_page_before_it() -> None:
    path = make_path()
    assert _start_of_holes(path, 0, 3) == 2
    assert _start_of_holes(path, 0, 5) == 5
    assert _start_of_holes(path, 0, 8) == 6
