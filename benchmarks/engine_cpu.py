"""The embedded engine against stock transformers and vLLM's CPU build, in one run. The last line is JSON.

Same weights, same dtype, greedy, the same number of threads and the same OpenMP; each peer in a process of its own, one
after another. With --repeat the order is rotated, and what is shown is the median. `others` is how many cores other
processes kept busy meanwhile: with much of that, measure again. vLLM lives in an environment of its own (make
setup-vllm), which also holds the OpenMP runtime it recommends: all peers get it, since with GNU's a barrier waits for
whoever else has the core.

    python benchmarks/engine_cpu.py --quick
    python benchmarks/engine_cpu.py --models qwen3-next --workloads chat,shared-560 --repeat 3 --profile
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import engine_models
import engine_workloads
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
PEERS = ("ours", "stock", "vllm")
QUICK_MODELS = ("qwen3-next", "gemma-3")
QUICK_WORKLOADS = ("unique", "shared-560", "chat")


class Figures(NamedTuple):
    """One peer on one workload; over repetitions, medians."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    """Tokens of prompts and replies, whether computed or cached."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    cached_tokens: float
    prompt_tokens: float
    wall_s: float
    cpu_s: float
    other_cores: float


def figures(played: dict[str, Any]) -> Figures:
    requests = [r for played_round in played["rounds"] for r in played_round["requests"]]
    wall_s = sum(played_round["wall_s"] for played_round in played["rounds"])
    ttft_s = sorted(r["ttft_s"] for r in requests)
    prompt_tokens = sum(r["prompt_tokens"] for r in requests)
    output_tokens = sum(len(r["output"]) for r in requests)
    return Figures(
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / wall_s,
        ttft_mean_s=statistics.mean(ttft_s),
        ttft_p50_s=statistics.median(ttft_s),
        ttft_p95_s=ttft_s[min(len(ttft_s) - 1, round(0.95 * (len(ttft_s) - 1)))],
        cached_tokens=sum(r["cached_tokens"] for r in requests),
        prompt_tokens=prompt_tokens,
        wall_s=wall_s,
        cpu_s=played["cpu_s"],
        other_cores=played["other_cores"],
    )


def median(of: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*of, strict=True)))


def phases(played: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Where requests spend their time, in seconds a request: waiting, to the first token, from then on."""
    requests = [r for p in played for played_round in p["rounds"] for r in played_round["requests"]]
    queue_s = [r["queue_s"] or 0.0 for r in requests]
    return {
        "queue_s": statistics.mean(queue_s),
        "prefill_s": statistics.mean(r["ttft_s"] - q for r, q in zip(requests, queue_s, strict=True)),
        "decode_s": statistics.mean(r["finish_s"] - r["ttft_s"] for r in requests),
    }


def agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The share of output tokens before the first that differs. Near ties fall either way in low precision."""
    same = total = 0
    for mine, other in zip(ours["rounds"], theirs["rounds"], strict=True):
        for a, b in zip(mine["requests"], other["requests"], strict=True):
            pairs = list(zip(a["output"], b["output"], strict=True))
            same += next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
            total += len(pairs)
    return same / total


class Failed(NamedTuple):
    why: str


def run_peer(peer: str, model_dir: Path, workloads: Path, args: argparse.Namespace) -> dict[str, Any] | Failed:
    """One peer in one process. A peer that fails does not stop the others."""
    python = args.vllm_python if peer == "vllm" else sys.executable
    if not Path(python).exists():
        return Failed(f"{python} does not exist; make setup-vllm builds it, --vllm-python names another")
    out = workloads.with_name(f"{peer}.json")
    out.unlink(missing_ok=True)
    command = [python, str(HERE / "engine_peers.py"), f"--{peer}", str(model_dir), str(workloads), str(out)]
    command += ["--dtype", args.dtype, "--threads", str(args.threads)] + ["--profile"] * args.profile
    command += ["--options", {"ours": args.ours_options, "vllm": args.vllm_options}.get(peer, "{}")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "LD_PRELOAD": args.preload}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        return Failed(f"no result after {args.timeout_s} s")
    if done.returncode != 0 or not out.exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Failed(f"exit status {done.returncode}: " + "\n".join(lines[-args.error_lines :]))
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def run_model(name: str, scratch: Path, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All peers on all workloads of one model: {peer: [result of each repetition]}, and the failures."""
    shape = engine_models.SHAPES[name]
    model_dir = scratch / name
    parameters = engine_models.build(name, model_dir, args.dtype)
    console.print(f"\n[bold]{name}[/bold]: {parameters / 1e6:.1f} M parameters, {args.dtype}, {args.threads} threads")
    sizes = engine_workloads.QUICK if args.quick else engine_workloads.FULL
    results: dict[str, list[dict[str, Any]]] = {peer: [] for peer in args.peers}
    failures: dict[str, str] = {}
    for repetition in range(args.repeat):
        workloads = scratch / "workloads.json"
        made = [engine_workloads.make(w, sizes, shape.vocab_size, seed=repetition) for w in args.workloads]
        engine_workloads.dump(made, workloads)
        turn = repetition % len(args.peers)
        for peer in (*args.peers[turn:], *args.peers[:turn]):
            if peer in failures:
                continue
            result = run_peer(peer, model_dir, workloads, args)
            if isinstance(result, Failed):
                failures[peer] = result.why
                console.print(f"  {peer} failed: {result.why}", markup=False)
            else:
                results[peer].append(result)
                console.print(
                    f"  {peer}: ready after {result['start_s']:.0f} s, warm {result['warm_up_s']:.0f} s later"
                )
    return {"parameters": parameters, "results": results, "failures": failures}


def tabulate(name: str, measured: dict[str, Any], args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """A table of one model, and the same as records."""
    table = Table(title=name, title_justify="left")
    columns = [
        "workload",
        "peer",
        "output tok/s",
        "total tok/s",
        "TTFT ms mean",
        "p50",
        "p95",
        "cached",
        "wall s",
        "CPU s",
    ]
    rivals = [peer for peer in ("stock", "vllm") if measured["results"].get(peer)]
    for column in [*columns, *(f"x {rival}" for rival in rivals), "= stock", "others"]:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    records: list[dict[str, Any]] = []
    for i, workload in enumerate(args.workloads):
        runs = {peer: [r["workloads"][i] for r in results] for peer, results in measured["results"].items() if results}
        figures_of = {peer: median([figures(p) for p in played]) for peer, played in runs.items()}
        for peer, f in figures_of.items():
            ratios = {r: f.output_tokens_per_s / figures_of[r].output_tokens_per_s for r in rivals}
            same = agreement(runs[peer][0], runs["stock"][0]) if "stock" in runs else None
            table.add_row(
                workload if peer == next(iter(figures_of)) else "",
                peer,
                f"{f.output_tokens_per_s:.1f}",
                f"{f.total_tokens_per_s:.0f}",
                *(f"{s * 1000:.0f}" for s in (f.ttft_mean_s, f.ttft_p50_s, f.ttft_p95_s)),
                f"{f.cached_tokens:.0f} of {f.prompt_tokens:.0f}",
                f"{f.wall_s:.2f}",
                f"{f.cpu_s:.2f}",
                *(f"{ratio:.2f}" for ratio in ratios.values()),
                "" if same is None else f"{same:.0%}",
                f"{f.other_cores:.1f}",
                end_section=peer == list(figures_of)[-1],
            )
            record = {"model": name, "workload": workload, "peer": peer, **f._asdict(), "phases": phases(runs[peer])}
            speeds = [figures(p).output_tokens_per_s for p in runs[peer]]
            record |= {"output_tokens_per_s_range": [min(speeds), max(speeds)], "same_as_stock": same}
            record |= {f"x_{rival}": ratio for rival, ratio in ratios.items()}
            record |= {f"ttft_x_{rival}": f.ttft_mean_s / figures_of[rival].ttft_mean_s for rival in rivals}
            records.append(record | {"held_ratio": measured["results"][peer][-1]["held_ratio"]})
    console.print(table)
    return records


def show_time(measured: dict[str, Any], records: list[dict[str, Any]], console: Console) -> None:
    """Where the time goes: per request from the outside, per kind of operation where it was profiled."""
    for record in records:
        if record["peer"] == "ours":
            parts = ", ".join(f"{k.removesuffix('_s')} {v * 1000:.0f} ms" for k, v in record["phases"].items())
            rival = f"; TTFT {record['ttft_x_vllm']:.2f} of vLLM's" if "ttft_x_vllm" in record else ""
            console.print(f"  ours, {record['workload']}: {parts} a request{rival}")
            if record["workload"] == records[-1]["workload"]:
                console.print(f"  ours: memory held is {record['held_ratio']:.3f} of the exact bytes")
    for peer, results in measured["results"].items():
        for workload, profile in results[-1].get("profile", {}).items() if results else ():
            parts = ", ".join(f"{kind} {share:.0%}" for kind, share in profile["shares"].items() if share >= 0.005)
            console.print(f"  {peer}, {workload}: {parts}")


def parse_args() -> argparse.Namespace:
    def listed(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            for name in (names := text.split(",")):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller workloads, fewer of them, the large models only")
    parser.add_argument("--models", type=listed(tuple(engine_models.SHAPES)))
    parser.add_argument("--workloads", type=listed(engine_workloads.NAMES))
    parser.add_argument("--peers", type=listed(PEERS), default=list(PEERS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--vllm-python", default=str(HERE.parent / ".venv-vllm/bin/python"))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="play everything once more under torch's profiler")
    parser.add_argument("--ours-options", default="{}", help="more arguments of our Engine, as JSON")
    parser.add_argument(
        "--vllm-options",
        default="{}",
        help='of vLLM\'s EngineArgs; {"enforce_eager": true} starts sooner, {"block_size": "default"} is its own',
    )
    parser.add_argument("--preload", help="LD_PRELOAD of every peer; default: Intel's OpenMP of vLLM's environment")
    parser.add_argument("--timeout-s", type=float, default=900, help="for one peer on one model")
    parser.add_argument("--error-lines", type=int, default=5)
    args = parser.parse_args()
    if args.preload is None:
        intel_openmp = Path(args.vllm_python).parent.parent / "lib/libiomp5.so"
        args.preload = str(intel_openmp) if intel_openmp.exists() else ""
    args.models = args.models or list(QUICK_MODELS if args.quick else engine_models.SHAPES)
    args.workloads = args.workloads or list(QUICK_WORKLOADS if args.quick else engine_workloads.NAMES)
    return args


def main() -> None:
    args = parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    records: list[dict[str, Any]] = []
    failures: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="hybridkv-bench-") as scratch:
        for name in args.models:
            measured = run_model(name, Path(scratch), args, console)
            of_model = tabulate(name, measured, args, console)
            show_time(measured, of_model, console)
            records += of_model
            failures |= {name: measured["failures"]} if measured["failures"] else {}
    run = {"dtype": args.dtype, "threads": args.threads, "repeat": args.repeat, "quick": args.quick}
    print(json.dumps({"benchmark": "engine_cpu", **run, "records": records, "failures": failures}))
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
