"""`hybridkv serve` under load: hundreds of streaming clients, of which some leave, cancel or ask for nonsense.

A server is started on loopback with a small hybrid model of random weights; the clients run in this process, on the
same cores. Watchers read the live events that the server's page shows. At the end nothing may be left: no sample that
runs or waits, and after a reset no page in use. The last line is JSON; the exit code says whether anything happened
that should not have.

    python benchmarks/serve_load.py --seconds 180 --clients 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import engine_models
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from serve_traffic import LENGTHS, Client, Log, Seen, asks

SHAPE = engine_models.SERVED
MODEL = "load"
PATIENCE_S = 120.0


def build(directory: Path) -> int:
    """The checkpoint with a tokenizer whose tokens are all texts; returns the number of parameters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    parameters = engine_models.build_shape(SHAPE, directory, "bfloat16")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(a + b for a in letters for b in letters if (a + b).isalpha())]
    vocabulary = {word: i for i, word in enumerate(words[: SHAPE.vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return parameters


@contextmanager
def server(directory: Path, memory: str, log: Path) -> Iterator[str]:
    """The URL of a server; it must end well."""
    command = [str(Path(sys.executable).with_name("hybridkv")), "serve", str(directory), "--port", "0"]
    command += ["--served-model-name", MODEL, "--memory", memory, "--device", "cpu", "--shutdown-timeout", "5"]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            lines = (line for line in process.stdout if line.startswith("Serving at "))
            yield next(lines).split()[2]
        finally:
            process.terminate()
            code = process.wait(PATIENCE_S)
    if code:
        raise SystemExit(f"the server ended with exit code {code}: see {log}")


async def drive(port: int, clients: int, watchers: int, seconds: float) -> tuple[Log, float, int]:
    """What clients saw, how long it took until the last of them was answered, and the bytes that watchers read."""
    log, start = Log(), time.monotonic()
    vocab_size = SHAPE.vocab_size
    watching = [asyncio.create_task(watch(port, start + seconds)) for _ in range(watchers)]
    everyone = [Client(port, MODEL, log).run(asks(i, vocab_size), start + seconds) for i in range(clients)]
    await asyncio.gather(*everyone)
    wall_s = time.monotonic() - start
    return log, wall_s, sum(await asyncio.gather(*watching))


async def watch(port: int, until: float) -> int:
    """Read all live events; returns the number of bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /v1/hybridkv/live HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    num_bytes = 0
    while (left := until - time.monotonic()) > 0:
        with suppress(TimeoutError):
            data = await asyncio.wait_for(reader.read(1 << 20), left)
            if not data:
                raise SystemExit("the server has ended a stream of live events")
            num_bytes += len(data)
    writer.close()
    return num_bytes


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        ":".join([one.name.removeprefix("hybridkv_"), *one.labels.values()]): one.value
        for family in families
        for one in family.samples
    }


def leftovers(url: str) -> dict[str, float]:
    """What the server still holds when everyone has gone; nothing, if all is well."""
    gauges = ("running_samples", "waiting_samples", "server_waiting_samples")
    end = time.monotonic() + 10
    while any((found := metrics(url))[name] for name in gauges) and time.monotonic() < end:
        time.sleep(0.2)
    urllib.request.urlopen(urllib.request.Request(f"{url}/admin/cache/reset", method="POST"), timeout=PATIENCE_S)
    held = {name: value for name, value in metrics(url).items() if name.startswith("memory_used_bytes:")}
    return {name: value for name, value in {**{name: found[name] for name in gauges}, **held}.items() if value}


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else float("nan")


def summary(streams: Sequence[Seen]) -> dict[str, float]:
    prompt_tokens = sum(one.prompt_tokens for one in streams)
    found: dict[str, float] = {"streams": len(streams)}
    for name in ("ttft_s", "per_token_s"):
        values = [getattr(one, name) for one in streams]
        found |= {f"{name}_{label}": round(percentile(values, share), 4) for label, share in SHARES.items()}
        found[f"{name}_p99_to_p50"] = round(percentile(values, 0.99) / max(percentile(values, 0.5), 1e-9), 2)
    found["longest_gap_s_p99"] = round(percentile([one.longest_gap_s for one in streams], 0.99), 4)
    found["cached_share"] = round(sum(one.cached_tokens for one in streams) / max(prompt_tokens, 1), 4)
    return found


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def show(by_length: dict[str, dict[str, float]]) -> None:
    table = Table(title="Streams by length", title_justify="left")
    table.add_column("")
    names = list(next(iter(by_length.values())))
    for length in by_length:
        table.add_column(length, justify="right")
    for name in names:
        table.add_row(name, *(f"{found[name]:,.4g}" for found in by_length.values()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--watchers", type=int, default=20)
    parser.add_argument("--memory", default="512MiB")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "model"
        parameters = build(directory)
        log_file = Path(place) / "server.log"
        with server(directory, chosen.memory, log_file) as url:
            port = int(url.rsplit(":", 1)[1])
            log, wall_s, watched = asyncio.run(drive(port, chosen.clients, chosen.watchers, chosen.seconds))
            before = metrics(url)
            left = leftovers(url)
        bugs = log_file.read_text().count("Traceback")
    lengths = {"all": log.streams, **{name: [one for one in log.streams if one.length == name] for name in LENGTHS}}
    by_length = {name: summary(streams) for name, streams in lengths.items()}
    show(by_length)
    step_s = sum(spent for name, spent in before.items() if name.startswith("step_seconds_total:"))
    report: dict[str, Any] = {
        "benchmark": "serve_load",
        "parameters": parameters,
        "clients": chosen.clients,
        "watchers": chosen.watchers,
        "watched_bytes": watched,
        "publish_share": round(before["publish_seconds_total"] / step_s, 5),
        "memory": chosen.memory,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "wall_s": round(wall_s, 1),
        "done": dict(log.done),
        "errors": dict(log.errors),
        "tracebacks": bugs,
        "left_over": left,
        "reply_tokens_per_s": round(sum(one.reply_tokens for one in log.streams) / wall_s, 1),
        "computed_tokens_per_s": round(before["computed_tokens_total"] / wall_s, 1),
        "steps": before["steps_total"],
        "preemptions": before["preemptions_total"],
        "followed": before["followed_total"],
        "checkpoints_evicted": before["cache_checkpoints_evicted_total"],
        "outcomes": {name.split(":")[1]: n for name, n in before.items() if name.startswith("requests_total:")},
        "by_length": by_length,
    }
    print(json.dumps(report))
    sys.exit(bool(log.errors or left or bugs))


if __name__ == "__main__":
    main()
