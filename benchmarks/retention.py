"""Policies and their parts, judged by the hits they leave: traces and made-up workloads through the real cache core.

Prompts are served one after the other, nothing is decoded. The made-up workloads need no file and have fixed seeds:

    chat       conversations that go on, each with its own inclination, among many that do not
    agents     sessions of twenty short turns, a few dozen requests apart
    documents  a few hundred texts of very different popularity, each asked one short question
    drift      the same, but every 1,500 requests other texts are popular
    noise      chat, and as many long prompts that never come back

Others are of prompts that leave an earlier one in its middle; these run on another model, and what is reported is the
part of the tokens that an earlier prompt had:

    templates  sessions of agents, with a template behind the conversation that changes for some prompts: short and long
               ones, and agents of four kinds
    users      a few questions of each user, after a profile of its own and a list of tools of the same length for all

`--tier 300GiB@20GB/s` replays only the latter, with a tier of host memory below the least memory: its idle room left
empty, and filled. `--ablation` also runs the learning policy without one of its parts at a time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.cache import Cache, CacheLayout, Candidate, NoRoom, Rating
from hybridkv.cache.retention.eviction_log import EvictionLog
from hybridkv.cache.retention.policy import EvictionPolicy, LeastRecentlyUsed, Numbers, RecencyAndFlops
from hybridkv.cache.retention.reuse import PredictedReuse
from hybridkv.models import compute_of, load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.replay import Setting, load_trace, parse_tier, replay
from hybridkv.replay.traces import Chains, Record, Trace
from hybridkv.spec import DType
from hybridkv.stream import Catalogue
from hybridkv.units import parse_size

PIECE = 256  # tokens that come and go together
SMALL_PIECE = 8
REQUESTS = 3000


class Prompt(NamedTuple):
    tokens: bytes | npt.NDArray[np.int32]
    num_tokens: int
    known_tokens: int


# --- workloads --------------------------------------------------------------------------------------------------------


class Text:
    """New pieces of text on demand."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.num_pieces = seed << 24

    def more(self, count: int) -> list[int]:
        self.num_pieces += count
        return list(range(self.num_pieces - count, self.num_pieces))


def documents(seed: int, drift: int = 0) -> Iterator[list[int]]:
    text = Text(seed)
    shelf = [text.more(text.chance.choice((8, 16, 32, 64))) for _ in range(600)]
    popularity = [1 / (rank + 1) ** 0.9 for rank in range(len(shelf))]
    for number in range(REQUESTS):
        if drift and number % drift == 0:
            text.chance.shuffle(shelf)
        yield text.chance.choices(shelf, popularity)[0] + text.more(2)


def sessions(seed: int, *, most_turns: int, pause: tuple[float, float], goes_on: bool) -> Iterator[list[int]]:
    """Prompts that grow turn by turn; pauses are log-normal, in requests. `goes_on`: all turns are taken."""
    text = Text(seed)
    openings = [text.more(6) for _ in range(8)]
    waiting: list[tuple[float, int, list[int], float, int]] = []
    for number in range(REQUESTS):
        inclination = 1.0 if goes_on else text.chance.betavariate(1, 3)
        first = text.chance.choice(openings) + text.more(text.chance.choice((2, 6, 20)))
        heapq.heappush(waiting, (text.chance.random() * REQUESTS, number, first, inclination, 0))
    for number in range(REQUESTS):
        now, _, prompt, inclination, turn = heapq.heappop(waiting)
        yield prompt
        if turn < most_turns and text.chance.random() < inclination:
            longer = prompt + text.more(text.chance.choice((2, 3, 6)))
            due = now + text.chance.lognormvariate(*pause)
            heapq.heappush(waiting, (due, REQUESTS + number, longer, inclination, turn + 1))


def noise(seed: int) -> Iterator[list[int]]:
    text, chats = Text(seed + 100), sessions(seed, most_turns=50, pause=(5.5, 1.0), goes_on=False)
    for _ in range(REQUESTS):
        yield text.more(40) if text.chance.random() < 0.5 else next(chats)


class Agent(NamedTuple):
    """A kind of agent that writes a template behind its conversation. Lengths are in small pieces."""

    opening: list[int]
    shortest: int
    longest: int
    share: float
    """Part of the prompts that leave the one before in front of its template, because the template changes."""


def templates(seed: int, kinds: Sequence[tuple[int, int, float]]) -> Iterator[list[int]]:
    """Sessions of agents: most prompts go on at the end of the one before, the others in front of its template.

    `kinds`: the shortest and the longest template of each kind of agent, in tokens, and its share of such prompts.
    """
    text = Text(seed)
    chance = text.chance
    agents = [Agent(text.more(60), a // SMALL_PIECE, b // SMALL_PIECE, share) for a, b, share in kinds]
    waiting: list[tuple[float, int, Agent, list[int], int]] = []
    for number in range(REQUESTS // 12):
        agent = chance.choice(agents)
        first = agent.opening + text.more(chance.randint(30, 120) + chance.randint(agent.shortest, agent.longest))
        heapq.heappush(waiting, (chance.random() * REQUESTS, number, agent, first, chance.randint(4, 20)))
    for number in range(REQUESTS):
        if not waiting:
            return
        now, _, agent, prompt, more = heapq.heappop(waiting)
        yield prompt
        if more:
            template = chance.randint(agent.shortest, agent.longest)
            if chance.random() < agent.share:
                prompt = prompt[:-template] + text.more(chance.randint(30, 120) + template)
            else:
                prompt = prompt + text.more(chance.choice((0, 6, 12, 30)))
            due = now + chance.lognormvariate(3.0, 0.7)
            heapq.heappush(waiting, (due, REQUESTS + number, agent, prompt, more - 1))


def users(seed: int) -> Iterator[list[int]]:
    """Users with a few questions each, after a profile of their own and a list of tools of the same length for all."""
    text = Text(seed)
    waiting: list[tuple[float, int, list[int], int]] = []
    for number in range(REQUESTS // 3):
        heapq.heappush(waiting, (text.chance.random() * REQUESTS, number, text.more(280), text.chance.randint(0, 5)))
    for number in range(REQUESTS):
        if not waiting:
            return
        now, _, profile, more = heapq.heappop(waiting)
        yield profile + text.more(text.chance.randint(10, 120))
        if more:
            heapq.heappush(waiting, (now + text.chance.lognormvariate(4.0, 0.7), REQUESTS + number, profile, more - 1))


WORKLOADS: dict[str, Callable[[], Iterator[list[int]]]] = {
    "chat": lambda: sessions(1, most_turns=50, pause=(5.5, 1.0), goes_on=False),
    "agents": lambda: sessions(2, most_turns=20, pause=(4.0, 0.7), goes_on=True),
    "documents": lambda: documents(3),
    "drift": lambda: documents(4, drift=1500),
    "noise": lambda: noise(5),
}
PARTING_WORKLOADS: dict[str, Callable[[], Iterator[list[int]]]] = {
    "templates": lambda: templates(6, [(560, 640, 1 / 6)]),
    "short templates": lambda: templates(7, [(160, 240, 1 / 3)]),
    "long templates": lambda: templates(8, [(1200, 1800, 1 / 8)]),
    "mixed templates": lambda: templates(9, [(600, 600, 1 / 6), (200, 400, 1 / 4), (1000, 1000, 1 / 2), (8, 8, 0)]),
    "users": lambda: users(10),
}


def made_up(name: str) -> Iterator[Prompt]:
    """Each prompt ends with a few tokens of its own, as a trace's last block does."""
    for number, pieces in enumerate(WORKLOADS[name]()):
        body = np.repeat(np.array(pieces, dtype=np.int32), PIECE)
        tokens = np.concatenate([body, np.full(37, 2**31 - 1 - number, dtype=np.int32)])
        yield Prompt(tokens, len(tokens), len(body))


def parting(name: str) -> Iterator[Prompt]:
    """The caller knows nothing of where these prompts may be continued."""
    for number, pieces in enumerate(PARTING_WORKLOADS[name]()):
        body = np.repeat(np.array(pieces, dtype=np.int32), SMALL_PIECE)
        tokens = np.concatenate([body, np.full(5, 2**31 - 1 - number, dtype=np.int32)])
        yield Prompt(tokens, len(tokens), len(tokens))


def seen_ratio(prompts: Iterator[Prompt], block_tokens: int) -> float:
    """Tokens in whole blocks that an earlier prompt had, without those of each prompt's last token."""
    known: set[int] = set()
    num_seen = num_tokens = 0
    for prompt in prompts:
        key, is_known = 0, True
        for start in range(0, (prompt.num_tokens - 1) // block_tokens * block_tokens, block_tokens):
            key = hash((key, bytes(prompt.tokens[start : start + block_tokens])))
            is_known = is_known and key in known
            num_seen += block_tokens * is_known
            known.add(key)
        num_tokens += prompt.num_tokens
    return num_seen / num_tokens


def from_trace(path: Path) -> Iterator[Prompt]:
    trace = load_trace(path)
    for index in range(len(trace)):
        request = trace[index]
        yield Prompt(request.prompt, request.prompt_tokens, request.known_tokens)


# --- policies ---------------------------------------------------------------------------------------------------------


class WithoutTurns(PredictedReuse):
    def rate(self, candidate: Candidate) -> Rating:
        return super().rate(candidate._replace(turn=0, num_hits=0))


class WithoutAdditions(PredictedReuse):
    def rate(self, candidate: Candidate) -> Rating:
        return super().rate(candidate._replace(new_tokens=1))


class WithoutSuperseding(PredictedReuse):
    def rate(self, candidate: Candidate) -> Rating:
        return super().rate(candidate._replace(is_superseded=False))


class WithoutSizes(PredictedReuse):
    def rate(self, candidate: Candidate) -> Rating:
        return super().rate(candidate._replace(start=0, end=1, num_bytes=1))


class WithoutTime(PredictedReuse):
    def value(self, lane: Numbers, age: int, oldest_age: int) -> float:
        return super().value(lane, 0, oldest_age) - 1e-12 * age


ABLATION: dict[str, type[PredictedReuse]] = {
    "reuse, no turns": WithoutTurns,
    "reuse, no additions": WithoutAdditions,
    "reuse, no superseding": WithoutSuperseding,
    "reuse, no sizes": WithoutSizes,
    "reuse, no eviction log": PredictedReuse,
    "reuse, no time": WithoutTime,
}


def hit_ratio(prompts: Iterator[Prompt], layout: CacheLayout, policy: EvictionPolicy, has_log: bool) -> float:
    cache = Cache(layout, policy=policy, run_operations=lambda operations: None)
    if not has_log:
        cache._prefixes.history.log = EvictionLog(limit=0)
    for prompt in prompts:
        known = prompt.known_tokens
        lease = cache.begin(prompt.tokens, breakpoints=[known] if known < prompt.num_tokens else [])
        if isinstance(cache.extend(lease, lease.num_tokens - lease.computed), NoRoom):
            cache.abort(lease)
            continue
        cache.commit(lease)
        cache.release(lease, keep=False)
    return round(cache.stats.hit_tokens / cache.stats.prompt_tokens, 4)


def parting_results(model_name: str, memories: Sequence[str]) -> dict[str, float]:
    """By workload and memory: the part of what was seen before that is hit, with the default policies."""
    model, results = load_model(model_name, state_dtype=DType.parse("fp32")), {}
    for source in PARTING_WORKLOADS:
        seen = 0.0
        for memory in memories:
            layout = CacheLayout.from_plan(make_plan(model, PlanOptions(parse_size(memory))))
            seen = seen or seen_ratio(parting(source), layout.block_tokens)
            hit = hit_ratio(parting(source), layout, PredictedReuse(), has_log=True)
            results[f"{source} {memory}"] = round(hit / seen, 4)
            print(f"{source:16s} {memory:8s} {hit:.4f} of {seen:.4f} seen before: {hit / seen:.4f}", flush=True)
    return results


def tier_results(model_name: str, memory: str, tier: str) -> dict[str, list[float]]:
    """By workload: hit ratios with a tier whose idle room is left empty, and filled."""
    plan = make_plan(load_model(model_name, state_dtype=DType.parse("fp32")), PlanOptions(parse_size(memory)))
    layout, results = CacheLayout.from_plan(plan), {}
    setting = Setting("", model_name, 1, parse_size(memory), layout.block_tokens, serial=True, prompts_only=True)
    setting = replace(setting, tiers=(parse_tier(tier),))
    for source in PARTING_WORKLOADS:
        chains, records = Chains(), []
        for prompt in parting(source):
            packed, size = bytes(prompt.tokens), 4 * layout.block_tokens
            pieces = (packed[start : start + size] for start in range(0, len(packed) - size + 1, size))
            chain = chains.number(pieces, layout.block_tokens)
            records.append(Record(0.0, prompt.num_tokens, 1, layout.block_tokens, chain, prompt=packed))
        trace, catalogue = Trace(source, records, chains.fanout), Catalogue(plan, layout, model_name)
        both = [replace(setting, trace=source, tier_fill=is_filled) for is_filled in (False, True)]
        ratios = [replay(trace, layout, one, catalogue=catalogue).hit_ratio for one in both]
        results[source] = [round(ratio, 4) for ratio in ratios]
        print(f"{source:16s} {memory} {tier}: {ratios[0]:.4f}, filled {ratios[1]:.4f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a trace; without any, all workloads")
    parser.add_argument("--model", default="qwen3.5-397b-a17b")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--memory", default="30GiB,100GiB", help="sizes of one rank, with commas between")
    parser.add_argument("--state-dtype", default="fp32")
    parser.add_argument("--parting-model", default="qwen3.5-35b-a3b", help="for prompts that part")
    parser.add_argument("--parting-memory", default="5GiB,8GiB,12GiB,20GiB,80GiB", help="sizes, with commas between")
    parser.add_argument("--tier", help="a tier of host memory, as SIZE@BANDWIDTH: only prompts that part, with it")
    parser.add_argument("--ablation", action="store_true", help="also without one part at a time")
    args = parser.parse_args()
    if args.tier:
        with_tier = tier_results(args.parting_model, args.parting_memory.split(",")[0], args.tier)
        facts = {"model": args.parting_model, "tier": args.tier, "hit_ratios": with_tier}
        print(json.dumps({"benchmark": "retention", **facts}))
        return
    model = load_model(args.model, tp=args.tp, state_dtype=DType.parse(args.state_dtype))
    policies: dict[str, Callable[[], EvictionPolicy]] = {
        "lru": LeastRecentlyUsed,
        "flops": lambda: RecencyAndFlops(compute_of(args.model).flops),
        "reuse": PredictedReuse,
    }
    policies |= ABLATION if args.ablation else {}
    results: dict[str, dict[str, float]] = {}
    sources: dict[str, Callable[[], Iterator[Prompt]]] = {name: partial(made_up, name) for name in WORKLOADS}
    if args.trace:
        sources = {path.stem: partial(from_trace, path) for path in args.trace}
    for source, prompts in sources.items():
        for memory in args.memory.split(","):
            layout = CacheLayout.from_plan(make_plan(model, PlanOptions(parse_size(memory))))
            row = results[f"{source} {memory}"] = {}
            for name, make in policies.items():
                start = time.perf_counter()
                row[name] = hit_ratio(prompts(), layout, make(), has_log=name != "reuse, no eviction log")
                seconds = time.perf_counter() - start
                print(f"{source} {memory:8s} {name:32s} {row[name]:.4f}  {seconds:.1f} s", flush=True)
    of_seen = {} if args.trace else parting_results(args.parting_model, args.parting_memory.split(","))
    found = {"hit_ratios": results, "parting_model": args.parting_model, "hit_of_seen": of_seen}
    print(json.dumps({"benchmark": "retention", "model": args.model, "tp": args.tp, **found}))


if __name__ == "__main__":
    main()
