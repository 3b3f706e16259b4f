"""A store with objects of a later version of hybridkv: requests compute what they cannot load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridkv.cache.tokens import lookup_key, pack_tokens
from tests.engine.drive import GREEDY, check_greedy
from tests.engine.zoo import prompt
from tests.store.versions import LATER, later, plant, raw_bytes
from tests.stream.drive import StreamDriver, filled, model_of
from tests.stream.faults import copy_of

SHARED = prompt(90, 1)


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("mode", ["async", "layerwise"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_load_of_an_unknown_object_fails_and_its_tokens_are_computed(family: str, mode: str, kind: str) -> None:
    store = copy_of(filled(family, "90/1"))
    driver = StreamDriver(model_of(family), store, mode)
    keys = driver.streamer.finder.block_keys(lookup_key().root).first(5, pack_tokens(SHARED))
    name = driver.streamer.catalogue.name(driver.streamer.catalogue.groups[0], keys[-1])
    assert store.delete([name]) == 1
    raw = later(name, kind)
    plant(store, name, raw)
    for request in ("a", "b"):
        driver.add(request, SHARED + prompt(9, ord(request)), replace(GREEDY, max_tokens=2))
        driver.run()
        check_greedy(driver, request)
        driver.drain()
        driver.cache.reset()
    assert driver.stats.failures == {"unknown": 2}
    assert driver.results["b"].cached_tokens < 80
    assert (store.stats.corrupt, store.stats.faults) == (0, 0)
    assert store.stats.unknown >= 2
    assert raw_bytes(store, name) == raw
    driver.close()
