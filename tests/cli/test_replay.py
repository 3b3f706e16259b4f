"""`hybridkv replay` as people use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli.main import run
from hybridkv.cli.replay_plot import make_figure
from hybridkv.replay import ReplayReport
from tests.replay.traces import MODEL, blocks, chats, write_trace

RATES = ["--prefill-rate", "10000", "--decode-rate", "100"]
SERIAL = ["--serial", "--prompts-only"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "trace.jsonl", chats(4, 3)))


@pytest.fixture
def many_chats(tmp_path: Path) -> str:
    """More than 300 MiB hold."""
    return str(write_trace(tmp_path / "trace.jsonl", chats(16, 3)))


def replay_json(capsys: pytest.CaptureFixture[str], trace: str, *args: str) -> Any:
    assert run(["replay", trace, "--model", MODEL, "--memory", "2GiB", *args, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_json_has_all_that_is_promised(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = replay_json(capsys, trace)
    assert report["requests"] == 12
    assert report["input_tokens"] == report["hit_tokens"] + sum(report["misses"].values())
    assert report["hit_ratio"] == report["hit_tokens"] / report["input_tokens"] > 0
    assert set(report["misses"]) >= {"never_seen", "kv_evicted", "state_missing", "window_missing", "below_block"}
    assert 0 < report["peak_bytes"] <= report["arena_bytes"] <= report["memory_bytes"] == 2 * 2**30
    assert report["seconds"] > 0
    assert (report["trace"], report["model"], report["tp"]) == ("trace.jsonl", MODEL, 1)
    assert report["accelerator"] == "h200"
    assert report["computed_flops"] > 0
    assert report["saved_flops"] > 0
    assert report["ttft_s"]["p99"] >= report["ttft_s"]["p10"] > 0
    assert report["continued"] == 8


def test_options_reach_the_replay(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--limit", "5", "--speed", "2", "--block-size", "32", "--state-dtype", "bf16", "--kv-cache-dtype", "fp8"]
    report = replay_json(capsys, trace, *options, *RATES)
    assert report["requests"] == 5
    assert (report["speed"], report["block_tokens"], report["accelerator"]) == (2, 32, None)
    assert (report["state_dtype"], report["kv_cache_dtype"]) == ("bf16", "fp8")
    report = replay_json(capsys, trace, *SERIAL)
    assert (report["serial"], report["prompts_only"], report["output_tokens"]) == (True, True, 0)
    assert report["ttft_s"] is None


def test_a_sweep_is_every_combination(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = ["--sweep", "memory=512MiB,2GiB", "--sweep", "block-size=16,64"]
    reports = replay_json(capsys, trace, *SERIAL, *sweeps)
    assert [(r["memory_bytes"] // 2**20, r["block_tokens"]) for r in reports] == [
        (512, 16),
        (512, 64),
        (2048, 16),
        (2048, 64),
    ]
    assert isinstance(replay_json(capsys, trace, *SERIAL, "--sweep", "tensor-parallel-size=1"), list)


def test_tiers(many_chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--memory", "300MiB"]
    tiers = ["--tier", "100MiB@10GB/s", "--tier", "1TiB@1GB/s,2ms"]
    report = replay_json(capsys, many_chats, *small, *tiers)
    assert [tier["size_bytes"] for tier in report["tiers"]] == [100 * 2**20, 2**40]
    assert [tier["latency_s"] for tier in report["tiers"]] == [0, 0.002]
    loaded = sum(tier["hit_tokens"] for tier in report["tiers"])
    assert report["memory_tokens"] + loaded == report["hit_tokens"]
    assert report["tier_loads"]["rule"] == "all"
    assert report["tier_loads"]["loads"] > 0
    assert report["tier_loads"]["seconds"]["p50"] > 0.002
    slow = replay_json(capsys, many_chats, *small, "--tier", "1TiB@1MB/s", "--tier-loads", "faster", "--serial")
    assert (slow["tier_loads"]["loads"], slow["tier_loads"]["seconds"]) == (0, None)
    assert slow["tier_loads"]["declined"] > 0
    without = replay_json(capsys, many_chats, *small)
    assert not {"tiers", "tier_loads", "memory_tokens"} & set(without)
    assert report["hit_tokens"] > without["hit_tokens"]


def test_idle_room_of_the_first_tier_is_filled_on_demand(many_chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--memory", "300MiB", "--serial", "--tier", "1TiB@1GB/s"]
    plain, filled = (replay_json(capsys, many_chats, *args, *more) for more in ([], ["--tier-fill"]))
    assert plain["tiers"][0]["spare_bytes"] == 0
    assert filled["hit_tokens"] >= plain["hit_tokens"]
    assert run(["replay", many_chats, "--model", "qwen3.5-0.8b", "--serial", "--tier-fill"]) == 2
    assert "--tier-fill without --tier" in capsys.readouterr().err


def test_a_sweep_over_the_size_of_the_last_tier(many_chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["--tier", "10MiB@10GB/s", "--tier", "1TiB@1GB/s"]
    args = [*SERIAL, *tiers, "--memory", "300MiB", "--sweep", "tier-size=0,1GiB,10GiB"]
    reports = replay_json(capsys, many_chats, *args)
    assert [[tier["size_bytes"] for tier in one["tiers"]] for one in reports] == [
        [10 * 2**20, size] for size in (0, 2**30, 10 * 2**30)
    ]
    hits = [report["hit_tokens"] for report in reports]
    assert hits[0] < hits[-1]
    assert run(["replay", many_chats, "--model", MODEL, *args]) == 0
    text = capsys.readouterr().out
    assert "last tier" in text
    assert "10 GiB" in text


def test_tables_of_tiers(many_chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["replay", many_chats, "--model", MODEL, "--memory", "300MiB"]
    assert run([*args, "--tier", "100GiB@2GB/s,1ms"]) == 0
    text = capsys.readouterr().out
    for words in ("tier 1", "memory", "loaded", "100 GiB", "2 GB/s", "1 ms", "loads", "load from tiers"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120
    assert run([*args, "--serial", "--tier", "100GiB@1KB/s"]) == 0
    assert "were given up" in capsys.readouterr().out
    assert run([*args, "--serial", "--tier", "100GiB@1KB/s", "--tier-loads", "faster"]) == 0
    assert "more would have" in capsys.readouterr().out


@pytest.fixture
def chat_trace(tmp_path: Path) -> list[str]:
    """Eight chats of different users behind one system message, and the tokenizer's directory."""
    pytest.importorskip("transformers")
    from tests.chats.templates import CHATML, tokenizer

    tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    system = {"role": "system", "content": "Answer in one short sentence. " * 40}
    lines = [
        {"messages": [system, {"role": "user", "content": f"{name}, who are you?" * 20}], "output_text": "I am."}
        for name in "ABCDEFGH"
    ]
    return [str(write_trace(tmp_path / "chats.jsonl", lines)), "--tokenizer", str(tmp_path / "tokenizer")]


def test_breakpoints_at_the_ends_of_messages(chat_trace: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = replay_json(capsys, *chat_trace)
    assert (found["breakpoints"], found["breakpoints_per_request"]) == (True, 1)
    without = replay_json(capsys, *chat_trace, "--no-breakpoints")
    assert (without["breakpoints"], without["breakpoints_per_request"]) == (False, 0)
    assert found["hit_tokens"] > without["hit_tokens"]
    swept = replay_json(capsys, *chat_trace, "--sweep", "breakpoints=off,on")
    assert [(one["breakpoints"], one["hit_tokens"]) for one in swept] == [
        (False, without["hit_tokens"]),
        (True, found["hit_tokens"]),
    ]


def test_tables_and_figures_of_breakpoints(
    chat_trace: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["replay", *chat_trace, "--model", MODEL, "--memory", "2GiB"]
    assert run(args) == 0
    text = capsys.readouterr().out
    assert "a request: where a checkpoint is wanted" in text
    assert "no breakpoints" not in text
    assert run([*args, "--no-breakpoints"]) == 0
    assert "policy reuse, no breakpoints" in " ".join(capsys.readouterr().out.split())
    for tier in ([], ["--tier", "1GiB@1GB/s"]):
        assert run([*args, *tier, "--sweep", "breakpoints=on,off"]) == 0
        text = capsys.readouterr().out
        assert "breakpoints" in text  # the words may stand on two lines
        assert max(map(len, text.splitlines())) <= 120
    pytest.importorskip("matplotlib")
    shown: list[list[ReplayReport]] = []
    monkeypatch.setattr("hybridkv.cli.replay.save_plot", lambda path, reports: shown.append(list(reports)))
    sweeps = ["--sweep", "memory=1GiB,2GiB", "--sweep", "breakpoints=on,off"]
    assert run([*args, *sweeps, "--plot", "never saved.png"]) == 0
    [axes] = make_figure(shown[0]).axes
    assert {line.get_label() for line in axes.get_lines()[:-1]} == {"breakpoints", "no breakpoints"}


def test_chats_that_cannot_be_read(chat_trace: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, option, tokenizer = chat_trace
    bad = str(write_trace(tmp_path / "bad.jsonl", [{"messages": [{"role": "user", "content": 5}]}]))
    for args, words in (
        ([trace], "chats.jsonl, line 1: a trace of messages needs a tokenizer: pass --tokenizer"),
        ([trace, option, f"{tokenizer}/tokenizer.json"], "needs a chat template, and the tokenizer has none: pass"),
        ([bad, option, tokenizer], "bad.jsonl, line 1: messages.0.content is a int: give a text"),
    ):
        assert run(["replay", *args, "--model", MODEL]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert words in captured.err


def test_tables_say_what_matters(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", trace, "--model", MODEL, "--memory", "2GiB"]) == 0
    text = capsys.readouterr().out
    for words in ("trace.jsonl", MODEL, "hit", "never seen", "checkpoints", "time to first token", "prefill saved"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120
    assert run(["replay", trace, "--model", MODEL, *SERIAL, "--sweep", "memory=1GiB,2GiB"]) == 0
    text = capsys.readouterr().out
    assert "1 GiB" in text
    assert "hit ratio" in text


def test_a_figure(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name, sweep in (("one.png", []), ("many.svg", ["--sweep", "memory=1GiB,2GiB", "--sweep", "block-size=16,32"])):
        path = tmp_path / name
        assert run(["replay", trace, "--model", MODEL, *SERIAL, *sweep, "--plot", str(path)]) == 0
        assert path.stat().st_size > 1000


def test_a_figure_shows_hit_ratios_from_zero_up_to_what_could_be_hit(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    shown: list[list[ReplayReport]] = []
    monkeypatch.setattr("hybridkv.cli.replay.save_plot", lambda path, reports: shown.append(list(reports)))
    sweep = ["--sweep", "memory=512MiB,1GiB,4GiB", "--sweep", "policy=reuse,lru", "--plot", "never saved.png"]
    found = replay_json(capsys, trace, *SERIAL, *sweep)
    [axes] = make_figure(shown[0]).axes
    bound = 100 * found[-1]["seen_ratio"]
    assert bound == 100 * (1 - found[-1]["misses"]["never_seen"] / found[-1]["input_tokens"]) > 0
    low, high = axes.get_ylim()
    assert low == 0
    assert bound < high <= 104
    *lines, limit = axes.get_lines()
    assert {line.get_label() for line in lines} == {"reuse", "lru"}
    assert sorted(y for line in lines for y in line.get_ydata()) == sorted(100 * one["hit_ratio"] for one in found)
    assert list(limit.get_ydata()) == [bound, bound]
    assert limit.get_label() == f"seen before: no cache supplies more than {bound:.1f}%"
    assert all(one["hit_ratio"] <= one["seen_ratio"] for one in found)
    assert list(axes.get_xticks()) == [0.5, 1, 4]


@pytest.mark.parametrize(
    ("sweeps", "axis", "ticks", "labels"),
    [
        (["tier-size=1GiB,4GiB"], "GiB of the last tier", [1, 4], {"reuse"}),
        (["tier-size=0,4GiB"], "GiB of the last tier", [0, 4], {"reuse"}),
        (["tier-size=1GiB,4GiB", "memory=1GiB,2GiB"], "GiB a rank", [1, 2], {"tier of 1 GiB", "tier of 4 GiB"}),
    ],
)
def test_a_figure_over_the_size_of_a_tier(
    sweeps: list[str],
    axis: str,
    ticks: list[int],
    labels: set[str],
    trace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    shown: list[list[ReplayReport]] = []
    monkeypatch.setattr("hybridkv.cli.replay.save_plot", lambda path, reports: shown.append(list(reports)))
    options = [part for sweep in sweeps for part in ("--sweep", sweep)]
    replay_json(capsys, trace, *SERIAL, "--tier", "1GiB@1GB/s", *options, "--plot", "never saved.png")
    [axes] = make_figure(shown[0]).axes
    assert axes.get_xlabel() == axis
    assert list(axes.get_xticks()) == ticks
    assert {line.get_label() for line in axes.get_lines()[:-1]} == labels


def test_a_figure_of_a_trace_that_shares_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = str(write_trace(tmp_path / "trace.jsonl", chats(1, 1)))
    args = ["replay", path, "--model", MODEL, *SERIAL, "--sweep", "memory=1GiB,2GiB"]
    assert run([*args, "--plot", str(tmp_path / "none.png")]) == 0


def test_a_figure_without_matplotlib_is_refused_at_once(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybridkv.cli.replay_plot.find_spec", lambda name: None)
    assert run(["replay", trace, "--model", MODEL, "--plot", "x.png"]) == 2
    assert "pip install 'hybridkv[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "nope"], "unknown model 'nope'"),
        (["--policy", "best"], "no policy 'best': choose one of"),
        (["--memory", "1MiB"], "give it at least"),
        (["--memory", "lots"], "80GiB"),
        (["--limit", "0"], "at least 1 request"),
        (["--speed", "0"], "speed 0"),
        (["--accelerator", "abacus"], "unknown accelerator 'abacus': choose one of a100"),
        (["--prefill-rate", "-1"], "more than 0 tokens a second"),
        (["--decode-rate", "0"], "more than 0 tokens a second"),
        (["--speed", "nan"], "speed nan"),
        (["--accelerator", "abacus", "--serial"], "unknown accelerator 'abacus'"),
        (["--sweep", "colour=red"], "with a key of memory, policy"),
        (["--sweep", "memory="], "KEY=V1,V2"),
        (["--sweep", "tensor-parallel-size=two"], "'two' is not a whole number"),
        (["--sweep", "tensor-parallel-size=1", "--sweep", "tensor-parallel-size=2"], "give all its values at once"),
        (["--sweep", "tp=1,2"], "tp is now tensor-parallel-size"),
        (["--sweep", "policy=lru,best"], "no policy 'best'"),
        (["--sweep", "breakpoints=on,maybe"], "'maybe' is neither on nor off"),
        (["--tier", "200GiB"], "tier '200GiB' has no bandwidth: write it as SIZE@BANDWIDTH"),
        (["--tier", "200GiB@fast"], "'fast' is not a bandwidth"),
        (["--tier", "200GiB@1GB/s,soon"], "'soon' is not a latency"),
        (["--tier-loads", "some"], "tier loads 'some': choose one of all, faster"),
        (["--sweep", "tier-size=1GiB"], "without a tier: add one, such as --tier 200GiB@2GB/s"),
        (["--tier", "1GiB@1GB/s", "--sweep", "tier-size=lots"], "'lots' is not a size"),
        (["--plot", "x.pdf"], "name it .png or .svg"),
        (["--state-dtype", "int3"], "choose one of"),
        (["--tokenizer", "nowhere"], "no tokenizer at nowhere"),
    ],
)
def test_nonsense_gets_one_line_and_exit_code_2(
    args: list[str], words: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", trace, "--model", MODEL, *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hybridkv: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_traces_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write_trace(tmp_path / "bad.jsonl", [blocks([1], 9), blocks([1], 99)])
    assert run(["replay", str(bad), "--model", MODEL, *SERIAL]) == 2
    assert "bad.jsonl, line 2: 1 hash_ids" in capsys.readouterr().err
    assert run(["replay", str(tmp_path / "none"), "--model", MODEL, *SERIAL]) == 2
    assert "cannot read trace" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--help"]) == 0
    assert "--sweep" in capsys.readouterr().out
