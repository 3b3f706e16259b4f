"""The connector in vLLM's engine: what it finds again, in one process and the next, and that no token differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import Family
from engines import Engine, Request, file_url, tokens, transfer_config
from oracle import Oracle
from shelves import forget, verify, wait_until_quiet

from hybridkv.store import inspect_store

SHARED = tokens(560, seed=1)
LONG = tokens(700, seed=2)
FIRST_TURN = tokens(300, seed=3)


@pytest.fixture(scope="session")
def directory(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def engine(family: Family, start: Callable[..., Engine], directory: Path) -> Engine:
    return start(family, kv_transfer_config=transfer_config([file_url(directory)]), max_num_batched_tokens=256)


def test_a_prompt_sent_again_is_found_to_its_last_token(engine: Engine, oracle: Oracle, directory: Path) -> None:
    first = engine.ask(LONG)
    assert first.cached == 0
    forget(engine, directory)
    again = engine.ask(LONG)
    # The state after the last token is stored, too; but one token must be left to compute.
    assert again.cached >= first.last_chunk_end(len(LONG) - 1)
    assert again.tokens == first.tokens
    oracle.check(first)
    oracle.check(again)


def test_the_end_of_a_reply_is_saved_when_it_ends_and_holds_no_block(
    engine: Engine, oracle: Oracle, directory: Path
) -> None:
    """vLLM's own cache can be emptied at once, without a step in between, and the next turn goes on after the reply."""
    first = engine.ask(tokens(310, seed=190))
    assert engine.call("reset_prefix_cache")
    wait_until_quiet(directory)
    second = engine.ask(first.said + tokens(40, seed=191))
    assert second.cached == len(first.said) - 1
    assert engine.call("reset_prefix_cache", reset_running_requests=True)
    oracle.check(first)
    oracle.check(second)


def test_what_is_found_counts_as_used(engine: Engine, directory: Path) -> None:
    """So that the store evicts it later."""
    prompt = tokens(600, seed=170)
    engine.ask(prompt)
    forget(engine, directory)
    before = used_at(directory)
    assert engine.ask(prompt).cached
    wait_until_quiet(directory)
    assert any(time > before[name] for name, time in used_at(directory).items() if name in before)


def test_nothing_is_found_after_a_reset_of_the_connector(engine: Engine, oracle: Oracle, directory: Path) -> None:
    """As after new weights. What is computed then is found again."""
    prompt = tokens(600, seed=180)
    replies = [engine.ask(prompt)]
    forget(engine, directory)
    assert engine.call("reset_connector")
    for _ in range(2):
        replies.append(engine.ask(prompt))
        forget(engine, directory)
    assert [reply.cached > 0 for reply in replies] == [False, False, True]
    for reply in replies:
        oracle.check(reply)


def used_at(directory: Path) -> dict[object, float]:
    with inspect_store(f"file://{directory}") as store:
        return {stored.name: stored.used_at for stored in store.objects()}


def test_a_longer_prompt_goes_on_where_the_other_ended(engine: Engine, oracle: Oracle, directory: Path) -> None:
    first = engine.ask(tokens(290, seed=10))
    forget(engine, directory)
    longer = engine.ask(tokens(290, seed=10) + tokens(41, seed=11))
    assert longer.cached == engine.family.found(290)
    oracle.check(first)
    oracle.check(longer)


def test_siblings_share_what_they_have_in_common(engine: Engine, oracle: Oracle, directory: Path) -> None:
    siblings = []
    for seed in range(20, 24):
        siblings.append(engine.ask(SHARED + tokens(400, seed)))
        forget(engine, directory)
    first = siblings[0]
    expected = first.last_chunk_end(len(SHARED))
    assert expected >= 384
    assert first.cached == 0
    assert all(sibling.cached >= expected for sibling in siblings[1:]), [one.cached for one in siblings]
    for sibling in siblings:
        oracle.check(sibling)


def test_turns_of_a_conversation(engine: Engine, oracle: Oracle, directory: Path) -> None:
    """300, 354 and 408 tokens: each turn goes on after the reply before. Its last token was sampled, never computed."""
    said, replies = FIRST_TURN, []
    for turn in range(3):
        replies.append(engine.ask(said, max_tokens=8))
        said = replies[-1].said + tokens(46, seed=30 + turn)
        forget(engine, directory)
    assert [len(reply.request.prompt) for reply in replies] == [300, 354, 408]
    assert [reply.cached for reply in replies] == [0, 307, 361]
    for reply in replies:
        oracle.check(reply)


def test_a_window_that_was_loaded_in_part_is_not_shared_as_a_whole(
    engine: Engine, oracle: Oracle, directory: Path
) -> None:
    """A load fills a window from its first visible token on. vLLM must not take that block for one it can share."""
    prompt = tokens(700, seed=160)
    first = engine.ask(prompt)
    forget(engine, directory)
    oracle.check(first)
    oracle.check(engine.ask(prompt))
    for count in (640, 512, 384):  # ends of vLLM's blocks; it has all of them in its own cache now
        oracle.check(engine.ask(prompt[:count] + tokens(50, seed=161)), exact=False)


def test_several_at_once(engine: Engine, oracle: Oracle, directory: Path) -> None:
    """Some are found, some are not, and they arrive while others are computed or looked up."""
    common = tokens(270, seed=40)
    first = engine.ask(common)
    forget(engine, directory)
    requests = [Request(common + tokens(20 * n + 1, seed=41 + n), at=n // 2) for n in range(4)]
    requests += [Request(tokens(150 + 77 * n, seed=50 + n), at=n) for n in range(4)]
    run = engine.run(requests)
    assert [run[str(n)].cached for n in range(4)] == [engine.family.found(270)] * 4
    oracle.check(first)
    oracle.check(run, exact=False)
    forget(engine, directory)
    again = engine.run(requests)
    assert all(again[name].cached >= len(request.prompt) - 1 - 256 for name, request in enumerate_names(requests))
    oracle.check(again, exact=False)


def enumerate_names(requests: list[Request]) -> list[tuple[str, Request]]:
    return [(str(number), request) for number, request in enumerate(requests)]


def test_salts_keep_prompts_apart(engine: Engine, oracle: Oracle, directory: Path) -> None:
    prompt = tokens(330, seed=60)
    mine = engine.ask(prompt, salt="mine")
    forget(engine, directory)
    replies = [engine.ask(prompt, salt="yours"), engine.ask(prompt)]
    forget(engine, directory)
    again = engine.ask([*prompt, 5], salt="mine")
    assert (mine.cached, [reply.cached for reply in replies], again.cached) == (0, [0, 0], engine.family.found(330))
    for reply in (mine, *replies, again):
        oracle.check(reply)


def test_a_hit_in_vllms_own_cache_beside_one_in_the_store(engine: Engine, oracle: Oracle, directory: Path) -> None:
    """vLLM itself still has whole blocks; the store has what follows them."""
    prompt = tokens(660, seed=70)
    first = engine.ask(prompt)
    engine.call("settle")
    wait_until_quiet(directory)
    longer = engine.ask(prompt + tokens(30, seed=71))
    assert longer.cached == engine.family.found(660)
    oracle.check(first)
    oracle.check(longer)


@pytest.mark.parametrize("when", [{"step": 1}, {"step": 2}, {"step": 4}, {"tokens": 3}], ids=str)
def test_a_request_is_aborted(when: dict[str, int], engine: Engine, oracle: Oracle, directory: Path) -> None:
    """In the middle of its lookup, its prefill or its reply: nothing is kept back, and what it stored is right."""
    free = engine.call("free_blocks")
    prompt = tokens(800, seed=80 + sum(when.values()) + len(str(when)))
    run = engine.run({"gone": Request(prompt), "stays": Request(tokens(90, seed=79))}, aborts={"gone": when})
    assert run["gone"].finish == "abort"
    oracle.check(run, exact=False)
    forget(engine, directory)
    assert engine.call("free_blocks") >= free
    again = engine.ask(prompt)
    oracle.check(again, exact=False)
    run = engine.run({"gone": Request(prompt)}, aborts={"gone": when})
    engine.reset()
    oracle.check(engine.ask(prompt), exact=False)


def test_metrics_tell_of_hits(engine: Engine, directory: Path) -> None:
    before = engine.call("metrics")["vllm:external_prefix_cache_hits"]
    engine.ask(tokens(290, seed=90))
    forget(engine, directory)
    found = engine.ask([*tokens(290, seed=90), 7, 8, 9]).cached
    assert engine.call("metrics")["vllm:external_prefix_cache_hits"] - before == found == engine.family.found(290)


def test_all_that_was_stored_is_whole(engine: Engine, directory: Path) -> None:
    engine.ask(tokens(260, seed=99))
    forget(engine, directory)
    assert verify(directory) > 0
