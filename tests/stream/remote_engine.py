"""An engine in a process of its own, on a store that others use too. Every logit is compared with the stock model's.

    python -m tests.stream.remote_engine URL FAMILY SEED ROUNDS

Prompts of all processes have the same few beginnings. The last line is JSON: what the store and the streams counted.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace

from hybridkv.store import open_store
from tests.engine.drive import GREEDY
from tests.engine.zoo import prompt
from tests.stream.drive import StreamDriver, model_of

BEGINNINGS = 6


def random_prompt(chance: random.Random) -> list[int]:
    """A beginning that all processes know, then an end of its own."""
    shared = prompt(120, chance.randrange(BEGINNINGS))[: chance.choice((48, 80, 96, 120))]
    return shared + prompt(chance.randrange(3, 20), chance.randrange(1 << 30))


def main(url: str, family: str, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    store = open_store(url)
    driver = StreamDriver(model_of(family), store, chance.choice(("async", "layerwise", "auto")))
    for number in range(rounds):
        for one in range(chance.randrange(1, 4)):
            driver.add(f"{number}/{one}", random_prompt(chance), replace(GREEDY, max_tokens=chance.randrange(1, 6)))
        driver.run()
        driver.drain()
        if chance.random() < 0.6:
            driver.cache.reset()
    driver.settle()
    counted, streamed = store.stats, driver.stats
    driver.close()
    kinds = ("saved", "evicted", "corrupt", "faults", "dropped")
    found = {kind: getattr(counted, kind) for kind in kinds}
    sys.stdout.write(
        json.dumps({**found, "loaded": streamed.loaded_tokens, "failures": dict(streamed.failures)}) + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
