"""The engines of the benchmark behind one interface, each run in a process of its own.

    python engine_peers.py --ours|--stock|--vllm MODEL WORKLOADS.json OUT.json [--dtype bfloat16]

A peer serves rounds of prompts. Times are counted from the arrival of a round, which is the same instant for all its
requests, whether or not the peer can take them all at once. Loading, compiling and a warm-up are not counted.

vLLM runs with compiled graphs and with the flags that gave its prefix cache the most hits on these models.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine_profile import CpuTime, breakdown
from engine_workloads import Histories, Workload, load, other_tokens, warm_up

MEMORY_GIB = 2  # for the caches of the engines that have one


@dataclass
class Record:
    """What one request saw."""

    ttft_s: float
    finish_s: float
    output: list[int]
    cached_tokens: int
    prompt_tokens: int = 0
    queue_s: float | None = None
    """Before its first step, where the peer says so."""


class Peer(ABC):
    @abstractmethod
    def __init__(self, model_dir: str, dtype: str, options: dict[str, Any]) -> None: ...

    @abstractmethod
    def serve(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Record]:
        """Serve requests that all arrive now, greedily, to exactly `max_tokens` tokens each."""

    def held_ratio(self, lengths: Sequence[int]) -> float | None:
        """Memory that requests of these lengths hold, against the exact bytes of their tokens and states."""
        return None

    def close(self) -> None:
        """Let go of what the process does not free by ending."""
        return


class Ours(Peer):
    def __init__(self, model_dir: str, dtype: str, options: dict[str, Any]) -> None:
        from hybridkv import Engine

        options = {"memory": f"{MEMORY_GIB}GiB", "device": "cpu"} | options
        self._engine = Engine(model_dir, dtype=dtype, **options)

    def serve(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Record]:
        from hybridkv import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        results = self._engine.generate(list(prompts), params, progress=False)
        return [
            Record(
                ttft_s=r.metrics.ttft_s,
                finish_s=r.metrics.total_s,
                output=list(r.token_ids),
                cached_tokens=r.cached_tokens,
                queue_s=r.metrics.queue_s,
            )
            for r in results
        ]

    def held_ratio(self, lengths: Sequence[int]) -> float:
        plan = self._engine.plan
        exact = sum(_exact_bytes(spec, length) for spec in plan.model.layers for length in lengths)
        return sum(plan.request_bytes(length) for length in lengths) / exact

    def close(self) -> None:
        self._engine.close()


def _exact_bytes(spec: Any, num_tokens: int) -> int:
    """What a layer must keep of a request, without blocks and padding."""
    if spec.kind == "linear_state":
        return int(spec.nbytes)
    return int(spec.nbytes) * min(num_tokens, getattr(spec, "window", num_tokens))


class Stock(Peer):
    """`model.generate`, one request after another."""

    def __init__(self, model_dir: str, dtype: str, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), **options).eval()

    def serve(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Record]:
        import torch

        arrival = time.perf_counter()
        records = []
        for prompt in prompts:
            begin = time.perf_counter()
            first = FirstToken()
            ids = torch.tensor([prompt])  # [1, S]
            with torch.inference_mode():
                out = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, streamer=first
                )
            records.append(
                Record(
                    ttft_s=first.at - arrival,
                    finish_s=time.perf_counter() - arrival,
                    output=out[0, len(prompt) :].tolist(),
                    cached_tokens=0,
                    queue_s=begin - arrival,
                )
            )
        return records


class FirstToken:
    """A streamer that only looks at the clock: it is given the prompt, then each token."""

    def __init__(self) -> None:
        self._puts = 0
        self.at = 0.0

    def put(self, _: object) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None: ...


def vllm_options(model_dir: str) -> dict[str, Any]:
    """What gave the most hits here, by the kind of model; flags that only change speed were not all tried.

    vLLM pads the blocks of a model with states until one weighs as much as a state. From 32-token steps that makes the
    smallest blocks (its CPU default of 128 rounds them up), and with keys every 32 tokens it finds prompts that end
    inside a block. With windows it knows only whole blocks, and finds more when it keeps them all.
    """
    config = json.loads((Path(model_dir) / "config.json").read_text())
    options: dict[str, Any] = {"max_model_len": 2048, "enable_prefix_caching": True, "block_size": 32}
    options["prefix_cache_retention_interval"] = None
    if "linear_attention" in config["layer_types"]:
        options["prefix_match_unit"] = 32
    return options


VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": str(MEMORY_GIB),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class Vllm(Peer):
    def __init__(self, model_dir: str, dtype: str, options: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine

        options = vllm_options(model_dir) | options
        options = {name: value for name, value in options.items() if value != "default"}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(model=model_dir, dtype=dtype, skip_tokenizer_init=True, disable_log_stats=True, **options)
        )
        self._served = 0
        self.extra_args: dict[str, Any] | None = None
        """What connectors and plugins read of the requests to come."""

    def serve(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Record]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arrival = time.perf_counter()
        names = [str(self._served + i) for i in range(len(prompts))]
        self._served += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                extra_args=self.extra_args,
                output_kind=RequestOutputKind.CUMULATIVE,
            )
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        records: dict[str, Record] = {}
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - arrival
            for out in outputs:
                if not out.outputs[0].token_ids:
                    continue
                record = records.setdefault(out.request_id, Record(now, now, [], 0))
                if out.finished:
                    record.finish_s = now
                    record.output = list(out.outputs[0].token_ids)
                    record.cached_tokens = out.num_cached_tokens or 0
        return [records[name] for name in names]

    def close(self) -> None:
        self._engine.engine_core.shutdown()


PEERS: dict[str, type[Peer]] = {"ours": Ours, "stock": Stock, "vllm": Vllm}


def play(peer: Peer, workload: Workload) -> dict[str, Any]:
    """Run one workload: the wall time of each round and the records of its requests."""
    histories = Histories()
    rounds = []
    begin_cpu = CpuTime.now()
    for requests in workload.rounds:
        prompts = [histories.prompt(r) for r in requests]
        begin = time.perf_counter()
        records = peer.serve(prompts, workload.max_tokens)
        wall_s = time.perf_counter() - begin
        for request, prompt, record in zip(requests, prompts, records, strict=True):
            if len(record.output) != workload.max_tokens:
                raise RuntimeError(f"{len(record.output)} tokens came back instead of {workload.max_tokens}")
            record.prompt_tokens = len(prompt)
            histories.reply(request, record.output)
        rounds.append({"wall_s": wall_s, "requests": [asdict(r) for r in records]})
    cpu = CpuTime.now()
    cpu_s, other_cores = cpu.own_s - begin_cpu.own_s, cpu.other_cores(begin_cpu)
    return {"name": workload.name, "rounds": rounds, "cpu_s": cpu_s, "other_cores": other_cores}


def run(
    peer_name: str,
    model_dir: str,
    workloads: Sequence[Workload],
    dtype: str,
    options: dict[str, Any],
    profiled: Sequence[Workload] = (),
) -> dict[str, Any]:
    """Everything one process does: start, warm up, play; and play some under the profiler."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    begin = time.perf_counter()
    peer = PEERS[peer_name](model_dir, dtype, options)
    try:
        ready = time.perf_counter()
        play(peer, warm_up(config["vocab_size"]))
        warm = time.perf_counter()
        results = [play(peer, w) for w in workloads]
        requests = [r for result in results for one in result["rounds"] for r in one["requests"]]
        held = peer.held_ratio([r["prompt_tokens"] + len(r["output"]) - 1 for r in requests])
        profile = {w.name: breakdown(partial(play, peer, w)) for w in profiled}
    finally:
        peer.close()
    times = {"start_s": ready - begin, "warm_up_s": warm - ready}
    return {"peer": peer_name, **times, "workloads": results, "profile": profile, "held_ratio": held}


def run_stock(model_dir: str, workloads: list[Workload], dtype: str) -> dict[str, Any]:
    return run("stock", model_dir, workloads, dtype, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    for name in PEERS:
        which.add_argument(f"--{name}", dest="peer", action="store_const", const=name)
    parser.add_argument("model")
    parser.add_argument("workloads", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="then play everything again, profiled")
    parser.add_argument("--options", type=json.loads, default={}, help="more of the engine's own options, as JSON")
    args = parser.parse_args()
    if args.peer == "vllm":
        for key, value in VLLM_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    workloads = load(args.workloads)
    profiled = [other_tokens(w) for w in workloads] if args.profile else []
    result = run(args.peer, args.model, workloads, args.dtype, args.options, profiled)
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
