"""What breakpoints at the ends of messages bring: made-up chats through the real cache core, with them and without.

Requests are served one after the other, with their replies. The chats have fixed seeds, and are rendered and tokenized
with the tokenizer of the demo model:

    assistants  chats of one to six turns with one of 400 assistants, each with a long system message of its own
    edits       chats with one of 4 assistants, whose users often go back and ask an earlier question differently
    documents   one or two questions about one of 500 documents, which is a message before the question

`--keep DIR` keeps the traces, for `hybridkv replay`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybridkv.cache import CacheLayout
from hybridkv.demo.files import demo_document, demo_model
from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.replay import Setting, load_tokenizer, load_trace, replay
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-35b-a3b")
    parser.add_argument("--memory", default="4GiB,8GiB,16GiB", help="sizes, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the traces in this directory")
    args = parser.parse_args()
    model, tokenize = load_model(args.model), load_tokenizer(demo_model())
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in WORKLOADS:
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
    print(json.dumps({"benchmark": "message_breakpoints", "model": args.model, "seed": args.seed, **results}))


if __name__ == "__main__":
    main()
