"""What breakpoints at the ends of messages bring: made-up chats through the real cache core, with them and without.

Requests are served one after the other, with their replies. The chats have fixed seeds, and are rendered and tokenized
with the tokenizer of the demo model:

    assistants  chats of one to six turns with one of 400 assistants, each with a long system message of its own
    edits       chats with one of 4 assistants, whose users often go back and ask an earlier question differently
    documents   one or two questions about one of 500 documents, which is a message before the question

`--keep DIR` keeps the traces, for `hybridkv replay`.

Then agent loops: one of 24 agents, with a system prompt and tools of its own, and a conversation that grows by a result
of a tool with every request. Their prompts have no breakpoints; those that the server sets after messages by itself;
those that a client names (after the system prompt and tools, and at the last message); or these with lifetimes of an
hour and of five minutes. Between the loops come questions of other clients, which nobody asks again. Hit ratios are
those of the cache core with the layout of `--model`; `--ttft` measures the CPU time to the first token with the demo
model, too, whose memory is 1/256 of that, and whose texts are a quarter as long. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from hybridkv import Engine, Prompt, SamplingParams
from hybridkv.cache import Cache, CacheLayout, NoRoom
from hybridkv.chats import ChatTokens, Mark
from hybridkv.chats.rendering import render_marked
from hybridkv.demo.files import demo_document, demo_model
from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.replay import Setting, load_tokenizer, load_trace, replay
from hybridkv.spec import ModelSpec
from hybridkv.units import parse_size

Chat = list[dict[str, str]]
REQUESTS = 1500
TOGETHER = 40
"""Chats that are open at the same time: their requests alternate."""


class Writer:
    """Texts of random words."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.words = demo_document().split()

    def text(self, fewest: int, most: int) -> str:
        return " ".join(self.chance.choices(self.words, k=self.chance.randint(fewest, most)))

    def message(self, role: str, fewest: int, most: int) -> dict[str, str]:
        return {"role": role, "content": self.text(fewest, most)}

    def popular(self, count: int) -> Callable[[], int]:
        """Draws one of `count` things, the first the most often."""
        weights = [1 / (rank + 1) ** 0.8 for rank in range(count)]
        return lambda: self.chance.choices(range(count), weights)[0]


def talk(writer: Writer, chat: Chat, turns: int) -> Iterator[tuple[Chat, str]]:
    """Requests of a chat, with their replies."""
    for _ in range(turns):
        chat = [*chat, writer.message("user", 10, 150)]
        reply = writer.text(40, 250)
        yield chat, reply
        chat = [*chat, {"role": "assistant", "content": reply}]


def assistants(writer: Writer, count: int = 400) -> Iterator[Iterator[tuple[Chat, str]]]:
    systems = [writer.message("system", 300, 2500) for _ in range(count)]
    draw = writer.popular(count)
    while True:
        yield talk(writer, [systems[draw()]], writer.chance.randint(1, 6))


def edits(writer: Writer) -> Iterator[Iterator[tuple[Chat, str]]]:
    systems = [writer.message("system", 300, 2500) for _ in range(4)]

    def edited() -> Iterator[tuple[Chat, str]]:
        chat = [writer.chance.choice(systems)]
        for _ in range(writer.chance.randint(2, 5)):
            done: list[tuple[Chat, str]] = []
            for request in talk(writer, chat, writer.chance.randint(1, 4)):
                done.append(request)
                yield request
            chat = writer.chance.choice(done)[0][:-1]  # back to before one of the last questions

    while True:
        yield edited()


def documents(writer: Writer, count: int = 500) -> Iterator[Iterator[tuple[Chat, str]]]:
    system = writer.message("system", 300, 300)
    shelf = [writer.message("user", 500, 4000) for _ in range(count)]
    draw = writer.popular(count)
    while True:
        read = {"role": "assistant", "content": "I have read it. What is your question?"}
        yield talk(writer, [system, shelf[draw()], read], writer.chance.randint(1, 2))


WORKLOADS: dict[str, Callable[[Writer], Iterator[Iterator[tuple[Chat, str]]]]] = {
    "assistants": assistants,
    "edits": edits,
    "documents": documents,
}


def lines(name: str, seed: int) -> Iterator[dict[str, Any]]:
    writer = Writer(seed)
    new = WORKLOADS[name](writer)
    open_chats = [next(new) for _ in range(TOGETHER)]
    for _ in range(REQUESTS):
        place = writer.chance.randrange(TOGETHER)
        while (request := next(open_chats[place], None)) is None:
            open_chats[place] = next(new)
        yield {"messages": request[0], "output_text": request[1]}


# --- agents -----------------------------------------------------------------------------------------------------------

WAYS = ("none", "automatic", "named", "lifetimes")
AGENTS = 24
AGENT_REQUESTS = 600
LOOPS = 16
"""Loops that run at the same time: their requests alternate."""
HOUR, FIVE_MINUTES = 3600.0, 300.0


class Ask(NamedTuple):
    """A request of a client."""

    client: str
    chat: Chat


def agent_requests(seed: int, count: int, scale: float) -> list[Ask]:
    """Requests of agents, and of others between them. `scale`: of the lengths of all texts."""
    writer = Writer(seed)

    def message(role: str, fewest: int, most: int) -> dict[str, str]:
        return writer.message(role, max(1, round(fewest * scale)), max(1, round(most * scale)))

    systems = [message("system", 800, 4000) for _ in range(AGENTS)]
    draw = writer.popular(AGENTS)

    def loop(number: int) -> Iterator[Ask]:
        chat = [systems[draw()], message("user", 20, 200)]
        for _ in range(writer.chance.randint(2, 12)):
            yield Ask(f"agent{number % 4}", chat)
            chat = [*chat, message("assistant", 20, 120), message("user", 20, 600)]

    numbers = iter(range(10**9))
    loops, asked = [loop(next(numbers)) for _ in range(LOOPS)], list[Ask]()
    while len(asked) < count:
        if writer.chance.random() < 0.3:
            asked.append(Ask("other", [message("user", 200, 2500)]))
            continue
        place = writer.chance.randrange(LOOPS)
        while (one := next(loops[place], None)) is None:
            loops[place] = loop(next(numbers))
        asked.append(one)
    return asked


def render(tokenizer: Any, ask: Ask, way: str) -> tuple[ChatTokens, dict[int, float]]:
    marks = []
    if way in ("named", "lifetimes") and ask.client != "other":
        wanted = (HOUR, FIVE_MINUTES) if way == "lifetimes" else (None, None)
        marks = [Mark(place, None, one) for place, one in zip((0, len(ask.chat) - 1), wanted, strict=True)]
    return render_marked(tokenizer, ask.chat, marks, has_ends=way == "automatic")


def core_hits(layout: CacheLayout, prompts: Sequence[tuple[str, ChatTokens, dict[int, float]]]) -> tuple[float, int]:
    """Part of the tokens of the agents' prompts that the cache core supplies, and checkpoints kept."""
    now, hit, total = 0.0, 0, 0
    cache = Cache(layout, run_operations=lambda operations: None, clock=lambda: now)
    for client, tokens, lifetimes in prompts:
        now += 1.0
        breakpoints, wanted = tokens.breakpoints, sorted(lifetimes.items())
        lease = cache.begin(tokens.token_ids, breakpoints=breakpoints, lifetimes=wanted, client=client)
        if client != "other":
            hit, total = hit + lease.cached_tokens, total + lease.prompt_tokens
        step = cache.extend(lease, lease.num_tokens - lease.computed)
        if isinstance(step, NoRoom):
            raise SystemExit(f"no room for a prompt of {lease.prompt_tokens} tokens: give --memory more")
        cache.commit(lease)
        cache.release(lease)
    return hit / total, cache.stats.checkpoints_kept


def first_tokens(memory_bytes: int, asks: Sequence[Ask], way: str) -> dict[str, float]:
    """Hits and CPU times to the first token of the agents' requests with the demo model, one request at a time."""
    once, hit, total, times = SamplingParams(max_tokens=1, temperature=0), 0, 0, list[float]()
    with Engine(demo_model(), memory=memory_bytes, device="cpu") as engine:
        engine.generate([[1, 2, 3] * 100], once, progress=False)  # the first step is slower
        for ask in asks:
            tokens, lifetimes = render(engine.tokenizer, ask, way)
            prompt = Prompt(tokens.token_ids, tokens.breakpoints, lifetimes)
            begin = time.process_time()
            [result] = engine.generate(prompt, once, client=ask.client, progress=False)
            if ask.client != "other":
                hit, total = hit + result.cached_tokens, total + prompt.num_tokens
                times.append(time.process_time() - begin)
    return {"hit_ratio": hit / total, "ttft_cpu_s": statistics.fmean(times)}


def run_agents(model: ModelSpec, memories: Sequence[str], seed: int, count: int, ttft: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    asks = agent_requests(seed, count, 1.0)
    results: dict[str, Any] = {}
    for way in WAYS:
        prompts = [(ask.client, *render(tokenizer, ask, way)) for ask in asks]
        for memory in memories:
            plan = make_plan(model, PlanOptions(parse_size(memory)))
            ratio, kept = core_hits(CacheLayout.from_plan(plan), prompts)
            results.setdefault(memory, {})[way] = round(ratio, 4)
            print(f"agents {memory:>6s} {way:>9s}: hit ratio {ratio:.4f}, {kept:,} checkpoints kept", flush=True)
    if ttft:
        few = agent_requests(seed, ttft, 0.25)
        for memory in memories[:1]:
            for way in WAYS:
                found = first_tokens(parse_size(memory) // 256, few, way)
                results.setdefault("demo", {})[way] = {name: round(value, 4) for name, value in found.items()}
                print(f"demo model {way:>9s}: {results['demo'][way]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-35b-a3b")
    parser.add_argument("--memory", default="4GiB,8GiB,16GiB", help="sizes, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agents", action="store_true", help="agent loops alone")
    parser.add_argument("--requests", type=int, default=AGENT_REQUESTS, help="of agents and others, for the cache core")
    parser.add_argument("--ttft", type=int, default=0, metavar="N", help="measure N requests with the demo model, too")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the traces in this directory")
    args = parser.parse_args()
    model, tokenize = load_model(args.model), load_tokenizer(demo_model())
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in () if args.agents else WORKLOADS:
            path = (args.keep or Path(scratch)) / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines(name, args.seed)), encoding="utf-8")
            start = time.perf_counter()
            trace = load_trace(path, tokenize)
            seconds = time.perf_counter() - start
            num_tokens = sum(record.prompt_tokens for record in trace.records)
            print(f"{name}: {len(trace)} requests, {num_tokens:,} tokens, read in {seconds:.1f} s", flush=True)
            results[name] = {"tokens": num_tokens, "tokens_read_per_s": round(num_tokens / seconds)}
            for memory in args.memory.split(","):
                plan = make_plan(model, PlanOptions(parse_size(memory)))
                row = results[name][memory] = {}
                for wanted in (False, True):
                    setting = Setting(
                        path.name,
                        args.model,
                        1,
                        plan.options.memory_bytes,
                        plan.options.block_tokens,
                        serial=True,
                        breakpoints=wanted,
                    )
                    report = replay(trace, CacheLayout.from_plan(plan), setting)
                    row["with" if wanted else "without"] = round(report.hit_ratio, 4)
                    row["seen"] = round(report.seen_ratio, 4)
                    print(
                        f"  {memory:>6s} {'with' if wanted else 'without':>8s} breakpoints"
                        f" ({report.breakpoints_per_request:.1f}): hit ratio {report.hit_ratio:.4f} of"
                        f" {report.seen_ratio:.4f}, {report.checkpoints_kept:,} checkpoints kept,"
                        f" {report.checkpoints_hit:,} used  {report.seconds:.1f} s",
                        flush=True,
                    )
    results["agents"] = run_agents(model, args.memory.split(","), args.seed, args.requests, args.ttft)
    print(json.dumps({"benchmark": "message_breakpoints", "model": args.model, "seed": args.seed, **results}))


if __name__ == "__main__":
    main()
