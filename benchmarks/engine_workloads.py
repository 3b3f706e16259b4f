"""The workloads of the engine benchmark, as data: what arrives when, as token ids.

A workload is a list of rounds. All requests of a round arrive at once, and the next round begins when the last of them
has finished. The prompt of a request is the history of its conversation, replies included, and its own tokens.

    unique     one round of prompts that share nothing
    shared-N   one request, then the burst of its siblings: N tokens in common, a suffix of their own
    chat       several conversations at once; each round is one turn of every one of them

Nothing here knows of models (but the size of a vocabulary) or engines.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

SHARED_TOKENS = (300, 560, 1500)
NAMES = ("unique", *(f"shared-{n}" for n in SHARED_TOKENS), "chat")


@dataclass(frozen=True)
class Request:
    conversation: int
    tokens: list[int]
    """What is new in the prompt."""


@dataclass(frozen=True)
class Workload:
    name: str
    max_tokens: int
    """Tokens each request generates: no more and no fewer."""
    rounds: list[list[Request]]


class Histories:
    """The conversations of one run: prompts out, replies in."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = defaultdict(list)

    def prompt(self, request: Request) -> list[int]:
        history = self._tokens[request.conversation]
        history.extend(request.tokens)
        return list(history)

    def reply(self, request: Request, tokens: list[int]) -> None:
        self._tokens[request.conversation].extend(tokens)


@dataclass
class Sizes:
    """How much of each workload. Lengths are drawn evenly from the ranges."""

    unique_requests: int = 16
    unique_tokens: tuple[int, int] = (100, 700)
    siblings: int = 8
    suffix_tokens: tuple[int, int] = (20, 80)
    conversations: int = 4
    turns: int = 5
    first_turn_tokens: tuple[int, int] = (150, 350)
    turn_tokens: tuple[int, int] = (20, 80)
    max_tokens: int = 32
    shared_tokens: tuple[int, ...] = field(default=SHARED_TOKENS)


FULL = Sizes()
QUICK = Sizes(unique_requests=8, siblings=5, conversations=3, turns=4, max_tokens=16)


def make(name: str, sizes: Sizes, vocab_size: int, seed: int) -> Workload:
    """One workload. Another seed shares no prefix with it, so that a repetition finds nothing in a warm cache."""
    rng = random.Random(f"{name}/{seed}")
    ids = range(2, vocab_size)  # 0 and 1 are special in some vocabularies

    def draw(length: tuple[int, int] | int) -> list[int]:
        return rng.choices(ids, k=length if isinstance(length, int) else rng.randint(*length))

    if name == "unique":
        rounds = [[Request(i, draw(sizes.unique_tokens)) for i in range(sizes.unique_requests)]]
    elif name == "chat":
        lengths = [sizes.first_turn_tokens] + [sizes.turn_tokens] * (sizes.turns - 1)
        rounds = [[Request(i, draw(length)) for i in range(sizes.conversations)] for length in lengths]
    elif name.startswith("shared-"):
        prefix = draw(int(name.removeprefix("shared-")))
        family = [Request(i, prefix + draw(sizes.suffix_tokens)) for i in range(sizes.siblings)]
        rounds = [family[:1], family[1:]]
    else:
        raise ValueError(f"no workload is called {name!r}; there are {', '.join(NAMES)}")
    return Workload(name, sizes.max_tokens, rounds)


def warm_up(vocab_size: int) -> Workload:
    """Every kind of step before the clock runs: a prompt alone, a mixed batch, decode in batches of several sizes."""
    rng = random.Random("warm-up")

    def request(i: int, num_tokens: int) -> Request:
        return Request(i, rng.choices(range(2, vocab_size), k=num_tokens))

    rounds = [[request(0, 300)], [request(i, 20 * i) for i in range(1, 7)], [request(0, 30)]]
    return Workload("warm-up", 4, rounds)


def other_tokens(workload: Workload) -> Workload:
    """The same workload in other words: a cache that knows the first knows nothing of this one."""
    ids = sorted({token for requests in workload.rounds for r in requests for token in r.tokens})
    other = dict(zip(ids, ids[1:] + ids[:1], strict=True))
    rounds = [[Request(r.conversation, [other[t] for t in r.tokens]) for r in requests] for requests in workload.rounds]
    return Workload(workload.name, workload.max_tokens, rounds)


def dump(workloads: list[Workload], path: Path) -> None:
    path.write_text(json.dumps([asdict(w) for w in workloads]))


def load(path: Path) -> list[Workload]:
    return [
        Workload(w["name"], w["max_tokens"], [[Request(**r) for r in requests] for requests in w["rounds"]])
        for w in json.loads(path.read_text())
    ]
