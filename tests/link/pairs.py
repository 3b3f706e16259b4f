"""A producer and a consumer in processes of their own, and what their answers are compared with.

Each answer is compared with that of one plain engine, and greedy tokens and logprobs also with the stock model.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from hybridkv.engine import Engine, Result, SamplingParams
from tests.engine.checkpoints import tokenizer
from tests.engine.drive import TOLERANCE
from tests.engine.zoo import build, fresh, oracle_logits
from tests.link.workers import PATIENCE_S, Worker, Workers

_numbers = itertools.count()
REMOTE_DECODE = {"do_remote_decode": True}


class Pair:
    """One producer and one consumer."""

    def __init__(
        self, family: str, transport: str = "cma", *, producer: Any = None, consumer: Any = None, **both: Any
    ) -> None:
        """`producer`, `consumer`, `both`: options of the one, the other, and both."""
        self.family = family
        self.workers = Workers()
        both = {"with_tokenizer": True, **both}
        try:
            self.producer = self.workers.start(family, transport, **{**both, **(producer or {}), "role": "prefill"})
            theirs = {**both, **(consumer or {}), "role": "decode", "peers": [self.producer.url]}
            self.consumer = self.workers.start(theirs.pop("family", family), transport, **theirs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.workers.__exit__(None, None, None)

    def hand_over(
        self, prompt: list[int], params: SamplingParams, *, salt: str = "", decode: SamplingParams | None = None
    ) -> Result:
        """The producer computes the prompt, then the consumer continues it. `decode`: other parameters for it."""
        first = self.producer.generate(prompt, params, salt=salt, transfer=REMOTE_DECODE)
        assert first.kv_transfer_params is not None
        result: Result = self.consumer.generate(prompt, decode or params, salt=salt, transfer=first.kv_transfer_params)
        return result

    def early(self, prompt: list[int], params: SamplingParams, order: str) -> Result:
        """Both requests at once, with an id of the caller's."""
        named = {"transfer_id": f"transfer {next(_numbers)}"}
        at = {"remote_host": "127.0.0.1", "remote_port": self.producer.port}
        asks: list[Callable[[], Future[Any]]] = [
            lambda: self.producer.ask("generate", prompt, params, transfer=REMOTE_DECODE | named),
            lambda: self.consumer.ask("generate", prompt, params, transfer={"do_remote_prefill": True} | named | at),
        ]
        pause_s = 0.0 if order == "at once" else 0.05
        if order == "consumer first":
            asks.reverse()
        first = asks[0]()
        time.sleep(pause_s)
        second = asks[1]()
        answers = [one.result(PATIENCE_S) for one in (first, second)]
        result: Result = answers[0 if order == "consumer first" else 1]
        return result

    def failures(self) -> dict[str, int]:
        """Failed arrivals of the consumer, by kind."""
        return dict(self.consumer.stats().link.failures)

    def check_at_rest(self) -> None:
        for worker in (self.producer, self.consumer):
            at_rest(worker)


class Pairs:
    """Pairs that tests share, one after the other. The oldest are closed."""

    _MOST = 3

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[Any, ...], Pair] = OrderedDict()

    def get(self, family: str, transport: str = "cma") -> Pair:
        key = (family, transport)
        if key not in self._pairs:
            while len(self._pairs) >= self._MOST:
                self._pairs.popitem(last=False)[1].close()
            self._pairs[key] = Pair(family, transport)
        self._pairs.move_to_end(key)
        pair = self._pairs[key]
        pair.producer.call("reset")
        pair.consumer.call("reset")
        return pair

    def drop(self, pair: Pair) -> None:
        self._pairs = OrderedDict((key, one) for key, one in self._pairs.items() if one is not pair)
        pair.close()

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()


def at_rest(worker: Worker, patience_s: float = 20.0) -> None:
    """Wait until an engine holds nothing for a transfer. Fails if it goes on holding something."""
    deadline = time.monotonic() + patience_s
    audit = worker.audit()
    while not audit.is_at_rest and time.monotonic() < deadline:
        time.sleep(0.02)
        audit = worker.audit()
    assert audit.is_at_rest, audit


# --- what is right ----------------------------------------------------------------------------------------------------


@functools.cache
def plain(family: str) -> Engine:
    """One engine without a link, in this process."""
    return Engine(fresh(family), memory="24MiB", device="cpu", tokenizer=tokenizer())


def expected(family: str, prompt: list[int], params: SamplingParams, salt: str = "") -> Result:
    [result] = plain(family).generate([prompt], params, cache_salt=salt, progress=False)
    return result


def check(family: str, prompt: list[int], params: SamplingParams, result: Result, salt: str = "") -> None:
    """A result is that of one plain engine and, as far as it says, that of the stock model."""
    right = expected(family, prompt, params, salt)
    assert len(result.completions) == len(right.completions) == params.n
    for one, other in zip(result.completions, right.completions, strict=True):
        assert one.error is None
        assert (one.index, one.token_ids) == (other.index, other.token_ids)
        assert (one.text, one.finish_reason, one.stop) == (other.text, other.finish_reason, other.stop)
        _check_logprobs(one.logprobs, other.logprobs)
        _check_rows(one.hidden_states, other.hidden_states)
        _check_stock(family, prompt, params, one)


def _check_logprobs(ours: Sequence[Any] | None, theirs: Sequence[Any] | None) -> None:
    assert (ours is None) == (theirs is None)
    for one, other in zip(ours or (), theirs or (), strict=True):
        assert abs(one.chosen - other.chosen) <= TOLERANCE
        assert list(one.top) == list(other.top)
        assert all(abs(one.top[token] - other.top[token]) <= TOLERANCE for token in one.top)


def _check_rows(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def _check_stock(family: str, prompt: list[int], params: SamplingParams, completion: Any) -> None:
    """Logprobs are the stock model's, and so are greedy tokens wherever its two best differ by more than that."""
    logits = oracle_logits(build(family), prompt + completion.token_ids)[len(prompt) - 1 : -1]
    is_stock = params.greedy and not (params.needs_penalties or params.logit_bias or params.min_tokens)
    for row, token in zip(logits, completion.token_ids, strict=True):
        best, second = row.topk(2).values.tolist()
        assert not is_stock or token == int(row.argmax()) or best - second <= TOLERANCE
    if completion.logprobs is not None:
        for row, token, known in zip(logits, completion.token_ids, completion.logprobs, strict=True):
            right = float(row.log_softmax(-1)[token])
            assert abs(known.chosen - right) <= TOLERANCE, f"the logprob of {token} is {right}, not {known.chosen}"
