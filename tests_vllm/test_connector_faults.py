"""A second process on the same store, and a store that fails in every way: no wrong token, no dead engine."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family
from engines import FAULTY_CONNECTOR, Engine, Request, file_url, tokens, transfer_config
from oracle import Oracle
from shelves import forget, verify, wait_until_quiet

from tests.store.faulty import Kind

ROUNDS = int(os.environ.get("HYBRIDKV_VLLM_ROUNDS", "2"))
LOAD_TIMEOUT_S = 0.5
STRIKING_S = 20.0
LONG = tokens(700, seed=2)
KINDS = [kind.name for kind in Kind]
AT_READING = [
    "MISSING",
    "SHORT_ROW",
    "FLIP_HEADER",
    "FLIP_ROW",
    "SLOW",
    "FAIL_LOOKUP",
    "FAIL_OPEN",
    "FAIL_READ",
    "LOST",
]


@pytest.fixture(scope="session")
def directory(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faulty-store")


@pytest.fixture(scope="session")
def faulty(family: Family, start: Callable[..., Engine], directory: Path) -> Engine:
    config = transfer_config([file_url(directory)], FAULTY_CONNECTOR, load_timeout_s=LOAD_TIMEOUT_S)
    return start(family, kv_transfer_config=config, max_num_batched_tokens=256)


def prompt_for(kind: str) -> list[int]:
    return tokens(300, seed=1000 + KINDS.index(kind))


@pytest.fixture(autouse=True)
def end_of_faults(faulty: Engine) -> Iterator[None]:
    yield
    faulty.call("set_faults", faults=[])


@pytest.fixture(scope="session")
def filled(faulty: Engine, oracle: Oracle, directory: Path) -> Engine:
    """The engine, after a prompt for every fault was stored."""
    for first in range(0, len(KINDS), 8):
        oracle.check(faulty.run([Request(prompt_for(kind)) for kind in KINDS[first : first + 8]]), exact=False)
    forget(faulty, directory)
    return faulty


def wait_until_struck(engine: Engine) -> None:
    """Writing is asynchronous, and so are its faults."""
    deadline = time.monotonic() + STRIKING_S
    while not all(engine.call("struck")):
        assert time.monotonic() < deadline, "the fault was never met"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault(kind: str, filled: Engine, oracle: Oracle, directory: Path) -> None:
    """It strikes a prompt that is in the store, and one that is to be stored. Afterwards the store is used again."""
    known, new = [*prompt_for(kind), 9], tokens(290, seed=2000 + KINDS.index(kind))
    free = filled.call("free_blocks")
    filled.call("set_faults", faults=[{"kind": kind}])
    replies = filled.run({"known": Request(known), "new": Request(new)})
    filled.call("settle")
    wait_until_struck(filled)
    filled.call("set_faults", faults=[])
    oracle.check(replies, exact=False)
    if kind in AT_READING:
        assert replies["known"].cached == 0
    else:
        assert replies["known"].cached == filled.family.found(300)
    forget(filled, directory)
    assert filled.call("free_blocks") == free
    later = filled.run([Request(known), Request(new)])
    oracle.check(later, exact=False)
    forget(filled, directory)
    last = filled.ask([*known, 8])
    assert last.cached >= filled.family.found(300)
    oracle.check(last, exact=False)


def test_an_abort_while_a_load_hangs(filled: Engine, oracle: Oracle, directory: Path) -> None:
    prompt = tokens(310, seed=3000)
    oracle.check(filled.ask(prompt))
    forget(filled, directory)
    filled.call("set_faults", faults=[{"kind": "SLOW"}])
    run = filled.run(
        {"gone": Request([*prompt, 5]), "stays": Request(tokens(40, seed=3001), max_tokens=60)},
        aborts={"gone": {"struck": 1}},
    )
    assert run["gone"].finish == "abort"
    assert run["gone"].spans == []
    assert all(filled.call("set_faults", faults=[]))
    oracle.check(run, exact=False)
    forget(filled, directory)
    again = filled.ask([*prompt, 5])
    assert again.cached == filled.family.found(310)
    oracle.check(again)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_faults(seed: int, filled: Engine, oracle: Oracle, directory: Path) -> None:
    """Requests with common prefixes, aborts and salts, while several faults strike now and then."""
    source = random.Random(seed)
    stems = [tokens(source.choice((130, 256, 300, 512)), seed=4000 + 10 * seed + n) for n in range(2)]
    for _ in range(3):
        faults: list[dict[str, Any]] = [
            {"kind": source.choice([*KINDS[:-1]]), "times": source.randrange(1, 4)} for _ in range(source.randrange(4))
        ]
        filled.call("set_faults", faults=faults)
        requests = {
            f"{n}": Request(
                source.choice(stems) + tokens(source.randrange(1, 200), seed=source.randrange(10**6)),
                max_tokens=source.randrange(1, 8),
                salt=source.choice((None, None, "salt")),
                at=source.randrange(6),
            )
            for n in range(source.randrange(1, 5))
        }
        aborts = {name: {"step": source.randrange(1, 8)} for name in requests if source.random() < 0.2}
        oracle.check(filled.run(requests, aborts=aborts), exact=False)
        filled.call("set_faults", faults=[])
        if source.random() < 0.7:
            forget(filled, directory)
    forget(filled, directory)
    verify(directory)


def test_another_process_finds_what_the_first_has_stored(
    family: Family, filled: Engine, start: Callable[..., Engine], oracle: Oracle, directory: Path
) -> None:
    """Also if it computes other chunks, in other blocks of its cache."""
    first = filled.ask(LONG)
    oracle.check(first)
    forget(filled, directory)
    config = transfer_config([file_url(directory)])
    heir = start(family, kv_transfer_config=config, max_num_batched_tokens=2048)
    second = heir.ask([*LONG, 4])
    assert second.cached == family.found(len(LONG))
    oracle.check(second)
    heir.reset()
    wait_until_quiet(directory)
    heir.close()
    verify(directory)
