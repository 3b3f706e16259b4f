"""The command line as people use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridkv import __version__
from hybridkv.cli.main import run
from hybridkv.models import catalogue
from tests.tiny import TINY, tiny_config


def plan_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert run(["plan", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_all_that_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan_json(capsys, "qwen3.5-397b-a17b", "--tensor-parallel-size", "2", "--memory", "100GiB")
    assert report["model"] == "qwen3.5-397b-a17b"
    assert report["tp"] == 2
    assert report["block_tokens"] == 16
    assert report["slab_bytes"] * report["num_slabs"] == report["arena_bytes"] <= 100 * 2**30
    assert report["kv_bytes_per_token"] == 15_360
    assert report["state_bytes"] == 45 * 2_134_016
    assert report["padding_ratio"] <= 0.02
    assert report["max_requests"] > 0
    assert report["verified"] is False
    for group in report["groups"]:
        assert group["stride_bytes"] * group["pages_per_slab"] == report["slab_bytes"]
        assert sum(row["nbytes"] for row in group["rows"]) == group["page_bytes"]
        assert [layer for row in group["rows"] for layer in row["layers"]] == group["layers"]
    uniform = report["uniform"]
    assert uniform["block_tokens"] == 2096
    assert uniform["by_pack_size"] == {"1": 2096, "2": 1056, "4": 528, "8": 272, "all": 144}
    assert uniform["max_requests"] == uniform["pack_sizes"][0]["max_requests"] > 0
    assert {size["name"] for size in uniform["pack_sizes"]} == set(uniform["by_pack_size"])


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--block-size", "32", "--attn-pack-size", "4", "--row-layers", "2", "--row-order", "klth", "--taps", "1,2"]
    dtypes = ["--kv-cache-dtype", "fp8", "--state-dtype", "bf16"]
    report = plan_json(capsys, "qwen3-next-80b-a3b", *args, *dtypes, "--memory", "20G", "--max-model-len", "1000")
    assert [report[key] for key in ("block_tokens", "attn_pack_size", "row_layers", "row_order")] == [32, 4, 2, "klth"]
    assert report["kv_bytes_per_token"] == 12_288
    assert report["memory_bytes"] == 20 * 2**30
    assert report["max_model_len"] == 1000
    groups = {group["name"]: group for group in report["groups"]}
    assert set(groups) == {"state", "full.0", "full.1", "full.2", "taps"}
    assert groups["full.0"]["page_bytes"] == 32 * 4 * 1024
    assert groups["taps"]["layers"] == [1, 2]


def test_mtp_layers_are_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    without, report = plan_json(capsys, "deepseek-v3"), plan_json(capsys, "deepseek-v3", "--mtp")
    assert (without["num_mtp_layers"], report["num_mtp_layers"]) == (0, 1)
    assert report["kv_bytes_per_token"] - without["kv_bytes_per_token"] == 2 * (512 + 64)
    assert report["groups"][0]["layers"] == list(range(62))
    assert run(["plan", "deepseek-v3", "--mtp"]) == 0
    assert "61 layers and 1 for multi-token prediction" in capsys.readouterr().out


def test_plans_of_unknown_types_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "foo", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**config, "num_key_value_heads": 2}))
    report = plan_json(capsys, str(path))
    assert (report["has_record"], report["model_type"]) == (False, "foo")
    assert plan_json(capsys, "qwen3.6-27b")["has_record"] is True
    words = "Unknown model type 'foo': this plan is read from the layer types of its config"
    assert run(["plan", str(path)]) == 0
    assert words in capsys.readouterr().out
    assert run(["plan", str(path), "qwen3.6-27b", "--compare"]) == 0
    table = capsys.readouterr().out
    assert f"** {words}" in table
    assert "m **" in table


def test_cut_states_are_reported_with_their_pages(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan_json(
        capsys, "qwen3.5-397b-a17b", "--tensor-parallel-size", "2", "--memory", "5GiB", "--max-model-len", "1024"
    )
    state = next(group for group in report["groups"] if group["kind"] == "linear_state")
    assert state["pages_per_item"] == 3
    assert [row["page"] for row in state["rows"]] == [0] * 4 + [1] * 4 + [2] * 4
    assert state["page_bytes"] * 3 == report["state_bytes"]


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_saved_models_are_planned(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    report = plan_json(capsys, str(tmp_path), "--memory", "64MiB", "--max-model-len", "512")
    assert report["model"] == tmp_path.name
    assert report["verified"] is True
    assert report["max_requests"] > 0
    assert run(["plan", str(tmp_path / "config.json"), "--memory", "64MiB"]) == 0


def test_several_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert [report["model"] for report in plan_json(capsys, "gpt-oss-120b", "gemma-3-27b")] == [
        "gpt-oss-120b",
        "gemma-3-27b",
    ]
    assert run(["plan", "gpt-oss-120b", "qwen3.6-27b", "mamba2-2.7b", "--compare"]) == 0
    table = capsys.readouterr().out
    assert "gpt-oss-120b" in table
    assert "784" in table
    assert "unverified" in table


def test_tables_say_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "qwen3.5-397b-a17b", "--tensor-parallel-size", "2", "--taps", "3"]) == 0
    text = capsys.readouterr().out
    for words in ("unverified", "linear state", "2,096", "144", "requests that fit", "weighs 6,252 tokens", "tap page"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120
    assert run(["plan", "gemma-3-27b", "--memory", "2GiB"]) == 0
    assert "give more --memory" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_catalogue_model_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", name]) == 0
    assert name in capsys.readouterr().out


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in catalogue())
    assert run(["models", "--json"]) == 0
    assert [record["model"] for record in json.loads(capsys.readouterr().out)] == sorted(catalogue())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plan", "nope"], "unknown model 'nope'"),
        (["plan", "qwen3-8b", "--mtp"], "qwen3-8b has no MTP layers"),
        (["plan", "qwen3.5-397b-a17b", "--tensor-parallel-size", "3"], "sizes that work: 1, 2, 4, 8, 16"),
        (["plan", "qwen3.5-397b-a17b", "--tensor-parallel-size", "0"], "size is 1 to 4096"),
        (["plan", "qwen3.5-397b-a17b", "--tensor-parallel-size", "two"], "--tensor-parallel-size"),
        (["plan", "gemma-3-27b", "--memory", "80QB"], "80GiB"),
        (["plan", "qwen3.5-397b-a17b", "--memory", "1MiB"], "give it at least 424MiB"),
        (["plan", "gemma-3-27b", "--block-size", "0"], "1 to 65536 tokens"),
        (["plan", "gemma-3-27b", "--attn-pack-size", "11"], "choose 1 to 10"),
        (["plan", "gemma-3-27b", "--kv-cache-dtype", "int3"], "choose one of"),
        (["plan", "gemma-3-27b", "--state-dtype", "int3"], "choose one of"),
        (["plan", "gemma-3-27b", "--row-order", "abc"], "not an order"),
        (["plan", "gemma-3-27b", "--taps", "a,b"], "write it as 0,12,24"),
        (["plan", "gemma-3-27b", "--max-model-len", "0"], "at least 1 token"),
        (["plan", "gemma-3-27b", "--max-model-len", "1" + "0" * 400], "at most 1,099,511,627,776 tokens"),
        (["plan", "gemma-3-27b", "--nonsense"], "--nonsense"),
        (["plan"], "MODEL"),
        (["nonsense"], "nonsense"),
    ],
)
def test_nonsense_gets_one_line_and_exit_code_2(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hybridkv: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize("command", ["plan", "models", "replay", "generate", "chat", "serve", "demo", "store", "why"])
def test_help_fits_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "[[" not in shown


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store"]) == 2
    captured = capsys.readouterr()
    assert "Usage: hybridkv store" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("args", [["--help"], ["plan", "--help"], ["models", "-h"], []])
def test_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 0
    captured = capsys.readouterr()
    assert "Usage" in captured.out
    assert captured.err == ""


def test_names_are_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "[red]x"
    tiny_config("llama").save_pretrained(path)
    for extra in ([], ["--compare"]):
        assert run(["plan", str(path), "--memory", "64MiB", *extra]) == 0
        assert "[red]x" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["models"], ["models", "--json"], ["plan", *sorted(catalogue())]])
def test_a_reader_that_leaves_is_no_error(args: list[str]) -> None:
    command = Path(sys.executable).with_name("hybridkv")
    with subprocess.Popen([command, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_full_disk_is_one_line() -> None:
    command = Path(sys.executable).with_name("hybridkv")
    with open("/dev/full", "w") as full:
        done = subprocess.run([command, "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("hybridkv: error: cannot write")
    assert done.stderr.count("\n") == 1


def test_the_installed_command() -> None:
    command = Path(sys.executable).with_name("hybridkv")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"hybridkv {__version__}\n"
    assert subprocess.run([command, "plan", "nope"], capture_output=True, check=False).returncode == 2
