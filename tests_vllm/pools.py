"""Random requests for engines whose cache is almost full: shared prefixes, salts, long replies, aborts."""

from __future__ import annotations

import random

from engines import Request, tokens

STEMS = 4


def workload(seed: int, count: int, longest: int) -> tuple[dict[str, Request], dict[str, dict[str, int]]]:
    """Return requests by name, and aborts of some. A prompt and its reply have at most `longest` tokens."""
    source = random.Random(seed)
    stems = [tokens(source.randrange(longest // 8, longest // 2), seed=1000 * seed + n) for n in range(STEMS)]
    requests: dict[str, Request] = {}
    aborts: dict[str, dict[str, int]] = {}
    arrival = 0
    for number in range(count):
        stem = source.choice(stems)
        prompt = stem[: source.choice((len(stem), len(stem), source.randrange(1, len(stem))))]
        prompt = prompt + tokens(source.choice((0, 1, source.randrange(1, longest // 3))), seed=source.randrange(10**6))
        reply = source.choice((1, 2, 8, source.randrange(1, max(2, min(40, longest - len(prompt))))))
        requests[str(number)] = Request(
            prompt[: longest - reply], max_tokens=reply, salt=source.choice((None, None, None, "salt")), at=arrival
        )
        if source.random() < 0.1:
            aborts[str(number)] = {"step": arrival + source.randrange(1, 12)}
        arrival += source.choice((0, 0, 0, 1, 2, 5))
    return requests, aborts
