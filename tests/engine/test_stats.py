"""What an engine tells of itself, and what it keeps to itself."""

from __future__ import annotations

from typing import Any

from hybridkv import Engine, SamplingParams
from hybridkv.cache import CacheGroup, Role
from hybridkv.engine import MemoryUse
from tests.cache.test_named import sim, tokens
from tests.engine.zoo import fresh, prompt


def test_pins_show_in_the_use_of_memory() -> None:
    groups = [CacheGroup("full", Role.FULL, 8, page_bytes=10), CacheGroup("state", Role.STATE, 1, page_bytes=80)]
    cache = sim(*groups)
    cache.serve(tokens(100))
    pin = cache.cache.pin(tokens(100), 60)
    use = MemoryUse.of(cache.cache, 80 * 400)
    assert (use.pinned_prefixes, use.pinned_bytes) == (1, 2 * 80)  # a slab of 7 blocks, and one of the state
    cache.cache.unpin(pin)
    use = MemoryUse.of(cache.cache, 80 * 400)
    assert (use.pinned_prefixes, use.pinned_bytes) == (0, 0)


class Watcher:
    """Notes the layers that it is told of."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.after: list[int] = []

    def before_layer(self, layer: int, frame: Any) -> None:
        self.before.append(layer)

    def after_layer(self, layer: int, frame: Any, hidden: Any) -> None:
        self.after.append(layer)


def test_an_engine_shows_itself_by_its_public_names_alone() -> None:
    watcher = Watcher()
    with Engine(fresh("llama"), memory="4MiB", device="cpu", store="memory://?size=4MiB") as engine:
        assert {name for name in vars(engine) if not name.startswith("_")} == {
            "device", "is_short_of_memory", "max_model_len", "model_name", "plan", "tokenizer"
        }  # fmt: skip
        assert engine.is_short_of_memory == (engine.max_model_len < 512)
        engine.observe_layers(watcher)
        engine.generate(prompt(40, 1), SamplingParams(max_tokens=2, temperature=0), progress=False)
        engine.flush_store()
        stats = engine.stats()
        num_layers = engine.plan.model.num_layers
    assert watcher.before == watcher.after == [*range(num_layers)] * stats.steps
    assert stats.stream is not None
    assert stats.stream.dumped
    assert stats.stream.dump_bytes_waiting == 0
    assert (stats.cache.prompt_tokens, stats.computed_tokens) == (40, 41)
