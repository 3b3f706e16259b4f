"""The decoding benchmark runs, with tiny models on a CPU, and its floor is made of the right bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(("model", "has_states"), [("qwen3.5-4b", True), ("gemma-3-4b", False)])
def test_the_decoding_benchmark_measures_each_case(model: str, has_states: bool) -> None:
    options = [
        "--quick",
        "--device",
        "cpu",
        "--models",
        model,
        "--requests",
        "2,1000",
        "--tokens",
        "40",
        "--steps",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_decode.py", *options], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["device"] == "cpu"
    measured, skipped = report["models"][model]["cases"]
    assert measured["ratio"] > 0
    assert set(measured["split"]) == {"schedule", "model", "sample", "commit"}
    assert measured["floor_ms"] == pytest.approx(sum(measured["floor"].values()), abs=0.01)
    assert (measured["floor"]["states_ms"] > 0) == has_states
    assert "fit into the memory" in skipped["skipped"]


def test_the_floor_counts_what_a_token_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_floor import seen_bytes

    from hybridkv.models import load_model

    spec = load_model("gemma-3-4b")
    local, full = spec.local_bytes_per_token, spec.kv_bytes_per_token
    assert seen_bytes(spec, 99) == 100 * (local + full)
    assert seen_bytes(spec, 8191) == 1024 * local + 8192 * full
