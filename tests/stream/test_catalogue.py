"""Which objects there are, what they hold and how they are named."""

from __future__ import annotations

import pytest

from hybridkv.cache.tokens import lookup_key, pack_tokens
from hybridkv.spec import LinearState
from hybridkv.stream import BlockKeys
from hybridkv.stream.catalogue import Catalogue, Stretch
from hybridkv.stream.form import StoredGroup
from tests.engine.zoo import prompt
from tests.stream.drive import StreamDriver, model_of, plain_store

SIZE = 16


def catalogue_of(family: str, **options: int) -> Catalogue:
    driver = StreamDriver(model_of(family), plain_store(), **options)  # type: ignore[arg-type]
    driver.close()
    return driver.streamer.catalogue


def group_of(catalogue: Catalogue, name: str) -> StoredGroup:
    return next(group for group in catalogue.groups if group.name == name)


@pytest.mark.parametrize(("end", "stretch"), [(16, (0, 1)), (32, (0, 2)), (48, (2, 3)), (80, (4, 5)), (96, (4, 6))])
def test_an_object_begins_at_a_multiple_of_a_stretch(end: int, stretch: tuple[int, int]) -> None:
    catalogue = catalogue_of("llama")
    assert catalogue.stretch(group_of(catalogue, "full"), end) == Stretch(*stretch)


@pytest.mark.parametrize(
    ("end", "stretch"), [(16, (0, 1)), (32, (0, 2)), (64, (2, 4)), (80, (4, 5)), (96, (4, 6)), (99, (6, 7))]
)
def test_an_object_of_a_window_holds_no_more_than_is_seen_from_its_end(end: int, stretch: tuple[int, int]) -> None:
    """A window of 20 sees 19 tokens before the next: from 96 on those from 77 on."""
    catalogue = catalogue_of("gemma3")
    group = group_of(catalogue, "window20")
    assert catalogue.stretch(group, end) == Stretch(*stretch)
    assert catalogue.num_tokens(group, end) == end - stretch[0] * SIZE


def test_an_object_of_a_window_shorter_than_a_span_leaves_the_rest_out() -> None:
    driver = StreamDriver(model_of("gemma3"), plain_store(), streamer_options={"stretch_tokens": 128})
    driver.close()
    catalogue = driver.streamer.catalogue
    assert catalogue.stretch(group_of(catalogue, "window20"), 112) == Stretch(5, 7)
    assert catalogue.stretch(group_of(catalogue, "full"), 112) == Stretch(0, 7)


def test_what_a_request_needs_to_resume() -> None:
    catalogue = catalogue_of("gemma3")
    full, local = group_of(catalogue, "full"), group_of(catalogue, "window20")
    assert catalogue.ends(full, 0, 112) == [32, 64, 96, 112]
    assert catalogue.ends(full, 50, 112) == [64, 96, 112]
    assert catalogue.ends(full, 64, 96) == [96]
    assert catalogue.ends(local, 0, 112) == [96, 112]
    assert catalogue.ends(local, 0, 80) == [64, 80]
    assert catalogue.ends(local, 70, 80) == [80]


def test_a_state_is_one_row_a_layer() -> None:
    driver = StreamDriver(model_of("qwen3_next"), plain_store())
    driver.close()
    catalogue, spec = driver.streamer.catalogue, driver.memory.plan.model
    group = group_of(catalogue, "state")
    assert catalogue.num_tokens(group, 80) == 1
    assert sum(group.row_bytes(1)) == spec.state_bytes
    assert len(group.row_bytes(1)) == sum(isinstance(one, LinearState) for one in spec.layers)


def test_names_cover_all_tokens_before_the_end_and_the_root() -> None:
    tokens = pack_tokens(prompt(64, 1))
    names = BlockKeys(lookup_key().root, SIZE).first(4, tokens)
    assert len(set(names)) == 4
    assert BlockKeys(lookup_key().root, SIZE).first(4, pack_tokens([5, *prompt(64, 1)[1:]]))[3] != names[3]
    assert BlockKeys(lookup_key("salt").root, SIZE).first(4, tokens)[0] != names[0]
    assert BlockKeys(lookup_key(extra_keys=["adapter"]).root, SIZE).first(4, tokens)[0] != names[0]


def test_names_asked_for_piece_by_piece_are_the_same() -> None:
    tokens = pack_tokens(prompt(64, 1))
    keys = BlockKeys(lookup_key().root, SIZE)
    pieces = [list(keys.first(count, tokens[: 4 * SIZE * count])) for count in (1, 3, 2, 4)]
    whole = list(BlockKeys(lookup_key().root, SIZE).first(4, tokens))
    assert pieces == [whole[:1], whole[:3], whole[:2], whole]


def test_a_namespace_depends_on_what_is_stored_alone() -> None:
    one = catalogue_of("falcon_h1")
    assert catalogue_of("falcon_h1", memory_bytes=64 << 20).namespace == one.namespace
    assert catalogue_of("falcon_h1", block_tokens=32).namespace != one.namespace
    assert catalogue_of("falcon_h1", row_layers=2).namespace == one.namespace
    assert catalogue_of("falcon_h1", attn_pack_size=1).namespace == one.namespace
