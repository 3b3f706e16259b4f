"""The workloads of vllm_connector.py that count tokens that hit. Each asks one request after another.

Nothing here knows of engines: a workload is given prompts and a function that asks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Ask = Callable[[list[int], int, Sequence[int]], tuple[int, list[int]]]
"""(prompt, max_tokens, breakpoints) -> (cached tokens, reply)"""

REPEATED_TOKENS = 700
SHARED_TOKENS, OWN_TOKENS, NUM_SIBLINGS = 560, 400, 4
TURNS = (300, 354, 408)
REPLY_TOKENS = 16


class Prompts:
    """Random tokens. Two calls never return the same beginning."""

    def __init__(self, vocab_size: int, seed: str = "prompts") -> None:
        self.vocab_size = vocab_size
        self._random = random.Random(seed)

    def of(self, name: str) -> Prompts:
        """Those of one workload: the same for all modes."""
        return Prompts(self.vocab_size, name)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self.vocab_size) for _ in range(count)]


def repeated(prompts: Prompts, ask: Ask) -> list[int]:
    prompt = prompts.tokens(REPEATED_TOKENS)
    return [ask(prompt, 1, ())[0] for _ in range(2)]


def siblings(prompts: Prompts, ask: Ask, breakpoints: Sequence[int] = ()) -> list[int]:
    shared = prompts.tokens(SHARED_TOKENS)
    return [ask(shared + prompts.tokens(OWN_TOKENS), 1, breakpoints)[0] for _ in range(NUM_SIBLINGS)]


def named_siblings(prompts: Prompts, ask: Ask) -> list[int]:
    """Requests say where others may part from them. Only CheckpointScheduler listens."""
    return siblings(prompts, ask, [SHARED_TOKENS])


def turns(prompts: Prompts, ask: Ask) -> list[int]:
    """Each prompt is the last one and more; the replies are thrown away."""
    prompt: list[int] = []
    cached = []
    for length in TURNS:
        prompt = prompt + prompts.tokens(length - len(prompt))
        cached.append(ask(prompt, 1, ())[0])
    return cached


def chat(prompts: Prompts, ask: Ask) -> list[int]:
    """As `turns`, but each prompt begins with the last one and its reply."""
    history: list[int] = []
    cached = []
    for length in TURNS:
        prompt = history + prompts.tokens(length - len(history))
        found, reply = ask(prompt, REPLY_TOKENS, ())
        cached.append(found)
        history = prompt + reply
    return cached


HITS: dict[str, Callable[[Prompts, Ask], list[int]]] = {
    f"{REPEATED_TOKENS} repeated": repeated,
    f"{SHARED_TOKENS} shared + {OWN_TOKENS} own": siblings,
    f"the same, {SHARED_TOKENS} named": named_siblings,
    "turns " + " -> ".join(map(str, TURNS)): turns,
    f"turns with replies of {REPLY_TOKENS}": chat,
}
