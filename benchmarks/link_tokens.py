"""One engine against two that share its work: a prefill and a decode engine, each on one core; the one has both cores.

Small models in float32, random weights. Three ways to the second token of a prompt: *one* engine; *after*: the decode
engine gets the request when the prompt was computed; *early*: both engines get it at once, by a `transfer_id`, and the
prompt is pushed while it is computed. Then the pace of replies while long prompts keep arriving.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import engine_models
import numpy as np
from link_child import Child
from link_engines import SHAPES, VOCAB_SIZE, Record, Worker
from link_sides import ENVIRONMENT, HOST
from rich.console import Console
from rich.table import Table

WAYS = ("one", "after", "early")
MEMORY = "384MiB"
NUM_REPLIES = 4
REPLY_PROMPT = 64
ENDLESS = 4000
"""Tokens of a reply that is stopped before it ends."""


class Sizes(NamedTuple):
    lengths: Sequence[int]
    repeats: int
    num_long: int
    """Long prompts that arrive while replies run."""
    long_tokens: int


FULL = Sizes((256, 1024, 2048, 4096), 3, 8, 1024)
QUICK = Sizes((256, 1024), 1, 2, 512)


class Trio:
    """One engine alone, and a prefill and a decode engine."""

    def __init__(self, one: Child, prefill: Child, decode: Child, port: int) -> None:
        self.one, self.prefill, self.decode = one, prefill, decode
        self._port = port
        self._numbers = count()
        self._random = np.random.default_rng(7)

    def prompt(self, num_tokens: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, VOCAB_SIZE, num_tokens)]

    def submit(self, way: str, prompt: list[int], max_tokens: int) -> tuple[Child, str]:
        """Start a request without waiting: "one" or "early". Returns who answers it, and its tag."""
        tag = f"request-{next(self._numbers)}"
        if way == "one":
            self.one.call("submit", tag, prompt, max_tokens)
            return self.one, tag
        remote = {"do_remote_prefill": True, "transfer_id": tag, "remote_host": HOST, "remote_port": self._port}
        self.decode.call("submit", tag, prompt, max_tokens, remote)
        self.prefill.call("submit", tag, prompt, max_tokens, {"do_remote_decode": True, "transfer_id": tag})
        return self.decode, tag

    def reply(self, way: str, prompt: list[int], max_tokens: int) -> tuple[float, Record]:
        """When the request was sent, and what came of it."""
        began = time.perf_counter()
        if way == "after":
            self.prefill.call("submit", "first", prompt, max_tokens, {"do_remote_decode": True})
            first: Record = self.prefill.call("wait", "first")
            self.decode.call("submit", "second", prompt, max_tokens, first.kv_transfer_params)
            return began, self.decode.call("wait", "second")
        child, tag = self.submit(way, prompt, max_tokens)
        record: Record = child.call("wait", tag)
        if way == "early":
            self.prefill.call("wait", tag)
        return began, record


@contextmanager
def trio(directory: Path) -> Iterator[Trio]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    link: dict[str, Any] = {"role": "prefill"}
    with ExitStack() as stack:

        def start(name: str, its_cores: Sequence[int], link: Mapping[str, Any] | None) -> Child:
            env = {**ENVIRONMENT, "OMP_NUM_THREADS": str(len(its_cores))}
            return stack.enter_context(Child(name, Worker, directory, list(its_cores), MEMORY, link, env=env))

        one, prefill = start("one", cores, None), start("prefill", cores[:1], link)
        one.begin("port")
        port = prefill.call("port")
        decode = start("decode", cores[-1:], {"role": "decode", "peers": [f"http://{HOST}:{port}"]})
        decode.call("port")
        one.end()
        yield Trio(one, prefill, decode, port)


def run(*, quick: bool) -> dict[str, Any]:
    sizes = QUICK if quick else FULL
    seconds, paces = [], []
    for name, shape in list(SHAPES.items())[: 1 if quick else None]:
        print(f"tokens: {name}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as directory:
            engine_models.build_shape(shape, Path(directory), "float32")
            with trio(Path(directory)) as engines:
                for way in WAYS:  # what is done once
                    engines.reply(way, engines.prompt(sizes.lengths[0]), 2)
                seconds += [_second_token(name, engines, length, sizes.repeats) for length in sizes.lengths]
                interval_s = 1.5 * _prefill_s(engines, sizes.long_tokens)
                paces += [{"model": name, "way": way, **_pace(engines, way, sizes, interval_s)} for way in WAYS[::2]]
                failures = engines.decode.call("failures")
                assert not failures, f"prompts that did not arrive: {failures}"
    return {"second_token": seconds, "pace": paces}


# --- the second token -------------------------------------------------------------------------------------------------


def _second_token(model: str, engines: Trio, length: int, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    same, received = 0, dict[str, Any]()
    for _ in range(repeats):
        prompt = engines.prompt(length)
        tokens = []
        for way in WAYS:
            begin, record = engines.reply(way, prompt, 4)
            times[way].append(record.times[1] - begin)
            tokens.append(record.tokens)
            if way != "one":
                assert record.received is not None, f"{way}: the prompt of {length} tokens was not received"
                received[way] = record.received
            prompt = prompt if way == "one" else _other(engines, prompt, way)
        same += all(one == tokens[0] for one in tokens[:2])
    medians = {way: statistics.median(times[way]) for way in WAYS}
    came = received["after"]
    return {
        "model": model,
        "tokens": length,
        **{f"{way}_ms": round(seconds * 1e3, 1) for way, seconds in medians.items()},
        "after_to_one": round(medians["after"] / medians["one"], 3),
        "early_to_after": round(medians["early"] / medians["after"], 3),
        "bytes": came["bytes"],
        "full_attention_bytes": came["full_attention_bytes"],
        "bytes_ratio": round(came["bytes"] / came["full_attention_bytes"], 4),
        "descriptors": came["descriptors"],
        "descriptors_early": received["early"]["descriptors"],
        "bytes_early": received["early"]["bytes"],
        "receive_ms": round(came["seconds"] * 1e3, 1),
        "same_replies": f"{same} of {repeats}",
    }


def _other(engines: Trio, prompt: list[int], way: str) -> list[int]:
    """A prompt that the prefill and the decode engine have not cached, as long as `prompt`."""
    return engines.prompt(len(prompt)) if way == "after" else prompt


def _prefill_s(engines: Trio, num_tokens: int) -> float:
    """Time of a prompt on one core."""
    begin = time.perf_counter()
    engines.prefill.call("submit", "alone", engines.prompt(num_tokens), 1)
    engines.prefill.call("wait", "alone")
    return time.perf_counter() - begin


# --- the pace of replies ----------------------------------------------------------------------------------------------


def _pace(engines: Trio, way: str, sizes: Sizes, interval_s: float) -> dict[str, Any]:
    """Times between tokens of replies that run while long prompts arrive, one every `interval_s`."""
    replies = [engines.submit(way, engines.prompt(REPLY_PROMPT), ENDLESS) for _ in range(NUM_REPLIES)]
    time.sleep(max(1.0, interval_s))
    began, waits = time.perf_counter(), []
    for number in range(sizes.num_long):
        time.sleep(max(0.0, began + number * interval_s - time.perf_counter()))
        waits.append((time.perf_counter(), *engines.submit(way, engines.prompt(sizes.long_tokens), 2)))
    long = [(begin, child.call("wait", tag)) for begin, child, tag in waits]
    ended = max(record.times[-1] for _, record in long)
    records: list[Record] = [child.call("stop", tag) for child, tag in replies]
    gaps = sorted(
        after - before for one in records for before, after in pairwise(one.times) if began <= before and after <= ended
    )
    assert gaps, "no reply ran while the prompts came"
    return {
        "replies": NUM_REPLIES,
        "long_prompts": sizes.num_long,
        "long_tokens": sizes.long_tokens,
        "interval_ms": round(interval_s * 1e3),
        "gaps": len(gaps),
        "median_ms": round(statistics.median(gaps) * 1e3, 1),
        "p95_ms": round(gaps[int(0.95 * (len(gaps) - 1))] * 1e3, 1),
        "max_ms": round(gaps[-1] * 1e3, 1),
        "long_second_token_ms": round(statistics.median(one.times[1] - begin for begin, one in long) * 1e3, 1),
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def show(console: Console, found: Mapping[str, Any]) -> None:
    table = Table(
        title="a prompt: bytes received, and ms to the second token (one engine on both cores, or two on one each)"
    )
    columns = ("model", "tokens", "KiB", "all full KiB", "ratio", "descriptors", "early", "receive ms")
    for column in (*columns, *(f"{way} ms" for way in WAYS), "after / one", "early / after", "same replies"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in found["second_token"]:
        table.add_row(
            row["model"],
            str(row["tokens"]),
            f"{row['bytes'] / 1024:.0f}",
            f"{row['full_attention_bytes'] / 1024:.0f}",
            f"{row['bytes_ratio']:.3f}",
            str(row["descriptors"]),
            str(row["descriptors_early"]),
            f"{row['receive_ms']:.1f}",
            *(f"{row[f'{way}_ms']:.0f}" for way in WAYS),
            f"{row['after_to_one']:.2f}",
            f"{row['early_to_after']:.2f}",
            row["same_replies"],
        )
    console.print(table)
    table = Table(title="ms between tokens of running replies while long prompts arrive")
    for column in (
        "model",
        "engines",
        "replies",
        "prompts",
        "every ms",
        "median",
        "p95",
        "max",
        "prompt's second token",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in found["pace"]:
        table.add_row(
            row["model"],
            "one" if row["way"] == "one" else "two",
            str(row["replies"]),
            f"{row['long_prompts']} x {row['long_tokens']}",
            str(row["interval_ms"]),
            *(f"{row[key]:.1f}" for key in ("median_ms", "p95_ms", "max_ms", "long_second_token_ms")),
        )
    console.print(table)
