"""`hybridkv plan --html`: the page says what the planner says, loads nothing, and is written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli.main import run
from hybridkv.cli.tables import tables_of
from hybridkv.models import compute_of, load_model
from hybridkv.models.family import FAMILIES
from hybridkv.plan import PlanOptions, make_plan, uniform_plan
from hybridkv.plan.gpus import GPUS
from tests.cli.html_reading import Page
from tests.tiny import tiny_config

MODEL = "qwen3.5-397b-a17b"
LENGTHS = [256 << i for i in range(8)]


def page_of(path: Path, *args: str) -> Page:
    assert run(["plan", *args, "--html", str(path)]) == 0
    return Page(path.read_text(encoding="utf-8"))


def numbers(cells: list[str]) -> list[int]:
    return [0 if cell == "-" else int(cell.replace(",", "")) for cell in cells]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(tmp_path_factory.mktemp("plan") / "plan.html", MODEL, "-tp", "2")


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    page_of(path, MODEL, "gpt-oss-120b")
    return path.read_text("utf-8")


def test_it_loads_nothing(two_models: str) -> None:
    tags = Page(two_models).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"https?:|//|url\(|@import|javascript:", two_models)
    for tag, attributes in tags:
        assert not any(name.startswith("on") or name in ("src", "srcset", "style") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#"), tag
    policy = next(attributes for tag, attributes in tags if "http-equiv" in attributes)
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_drawing_is_described_and_ids_are_unique(two_models: str) -> None:
    page = Page(two_models)
    ids = [str(attributes["id"]) for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == 6
    for attributes in drawings:
        assert attributes["role"] == "img"
        assert set(str(attributes["aria-labelledby"]).split()) <= set(ids)
    labels = {
        "length of each request (tokens)",
        "requests at once",
        "block size (tokens)",
        "GPUs (tensor-parallel size)",
    }
    assert labels <= set(page.texts["text"])


def test_its_tables_are_those_of_the_command(page: Page) -> None:
    plan = make_plan(load_model(MODEL, tp=2), PlanOptions(80 * 2**30))
    for table in tables_of(plan, 32768):
        columns = [[str(cell) for cell in column.cells] for column in table.columns]
        rows = [list(row) for row in zip(*columns, strict=True)]
        shown = page.tables[str(table.title)]
        assert (shown[1:] if table.show_header else shown) == rows
        assert not table.show_header or shown[0] == [column.header for column in table.columns]


def test_requests_by_length_are_the_planners(page: Page) -> None:
    model = load_model(MODEL, tp=2)
    plan, uniform = make_plan(model, PlanOptions(80 * 2**30)), uniform_plan(model, 80 * 2**30)
    packed = uniform_plan(model, 80 * 2**30, 15)
    assert numbers(page.column("Requests that fit", "tokens")) == LENGTHS
    for header, planned in (
        ("hybridkv", plan),
        ("uniform, 1 layer a page", uniform),
        ("uniform, all 15 layers a page", packed),
    ):
        fits = [planned.max_requests(length) for length in LENGTHS]
        assert numbers(page.column("Requests that fit", header)) == fits
        for length, count in zip(LENGTHS, fits, strict=True):
            assert f"{header}: {count:,} at {length:,}" in page.texts["title"]


def test_blocks_by_packing_are_the_planners(page: Page) -> None:
    model = load_model(MODEL, tp=2)
    table = "Uniform pages, and hybridkv, by N"
    sizes = numbers(page.column(table, "N"))
    assert sizes == [1, 2, 4, 8, 15]
    uniform = [uniform_plan(model, 80 * 2**30, size) for size in sizes]
    ours = [make_plan(model, PlanOptions(80 * 2**30, attn_pack_size=size)) for size in sizes]
    assert numbers(page.column(table, "block (tokens)")) == [one.block_tokens for one in uniform]
    assert numbers(page.column(table, "fit at 32,768")) == [one.max_requests(32768) for one in uniform]
    assert numbers(page.column(table, "hybridkv fit")) == [one.max_requests(32768) for one in ours]
    assert page.column(table, "hybridkv padding") == [f"{one.padding_ratio:.2%}" for one in ours]
    assert {f"{one.block_tokens:,}" for one in uniform} <= set(page.texts["text"])


def test_gpus_are_the_planners(page: Page) -> None:
    weights = compute_of(MODEL).total_parameters * 2
    table, found = "Requests of 32,768 tokens, by number of GPUs", []
    assert page.tables[table][0][1:] == ["1", "2", "4", "8", "16"]
    for gpu, row in zip(GPUS, page.tables[table][1:], strict=True):
        for tp, held in zip((1, 2, 4, 8, 16), numbers(row[1:]), strict=True):
            room = int(gpu.memory_bytes * 0.9) - -(-weights // tp)
            assert held == (
                make_plan(load_model(MODEL, tp=tp), PlanOptions(room)).max_requests(32768) if room > 0 else 0
            )
            found.append(held)
    assert any(found)
    assert not all(found)
    fewest = {row[0]: row[1:] for row in page.tables["Fewest GPUs for so many requests at once"][1:]}
    assert fewest["64 x 32,768 tokens"] == ["-", "-", "-", "8", "8", "4"]
    assert "396.3 billion parameters" in " ".join(page.texts["p"])


def test_a_model_whose_parameters_are_not_known_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny/config.json").read_text())
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], weight_defaults={}))
    del config["intermediate_size"]
    (tmp_path / "tiny/config.json").write_text(json.dumps(config))
    page = page_of(tmp_path / "page.html", str(tmp_path / "tiny"), "--memory", "64MiB")
    assert any("the cache alone" in words for words in page.texts["p"])


@pytest.mark.parametrize(
    ("model", "tokens", "memory"),
    [
        ("mamba2-2.7b", 1, "80GiB"),
        ("gemma-3-27b", 100, "1GiB"),
        ("qwen3-next-80b-a3b", 9000, "200MiB"),
        ("deepseek-v3", 3_000_001, "20GiB"),
        ("falcon-h1-34b", 2**40, "80GiB"),
    ],
)
def test_models_of_every_kind_have_a_page(model: str, tokens: int, memory: str, tmp_path: Path) -> None:
    page = page_of(tmp_path / "page.html", model, "--max-model-len", str(tokens), "--memory", memory)
    assert page.texts["h1"] == [f"Cache plan: {model}"]
    assert {"Groups", "Requests that fit"} <= set(page.tables)
    assert numbers(page.column("Requests that fit", "tokens"))[-1] == tokens


@pytest.mark.parametrize("name", ['<script>alert("x")</script>', "a&amp;b'\"><img src=x>", "[bold]x[/bold]"])
def test_names_are_escaped(name: str, tmp_path: Path) -> None:
    directory = tmp_path / name.replace("/", "\N{DIVISION SLASH}")
    tiny_config("llama").save_pretrained(directory)
    page = page_of(tmp_path / "page.html", str(directory), str(directory), "--memory", "64MiB")
    assert page.texts["h2"] == [directory.name] * 2
    assert page.texts["a"] == [directory.name] * 2
    assert [row[0] for row in next(iter(page.tables.values()))[1:]] == [directory.name] * 2
    assert not {tag for tag, _ in page.tags} & {"script", "img"}


def test_names_that_are_no_text_are_written_as_escapes(tmp_path: Path) -> None:
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    try:
        tiny_config("llama").save_pretrained(tmp_path / "good")
        (tmp_path / "good").rename(directory)
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    page = page_of(tmp_path / "page.html", str(directory), "--memory", "64MiB", "--json")
    assert page.texts["h1"] == ["Cache plan: bad\\udcff"]


def test_unknown_types_and_mtp_layers_are_said_to_be(tmp_path: Path) -> None:
    config = {"model_type": "foo", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["plan", str(tmp_path), "--mtp", "--html", str(tmp_path / "plan.html")]) == 0
    text = (tmp_path / "plan.html").read_text()
    assert "Unknown model type &#x27;foo&#x27;: this plan is read from the layer types of its config." in text
    assert "2 layers and 1 for multi-token prediction" in text
    assert run(["plan", "deepseek-v3", "--mtp", "--html", str(tmp_path / "plan.html")]) == 0
    assert "without norms, biases and MTP layers" in (tmp_path / "plan.html").read_text()


def test_it_goes_with_the_other_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--block-size", "32", "--attn-pack-size", "4", "--memory", "20GiB", "--max-model-len", "1000"]
    options += ["--kv-cache-dtype", "fp8", "--taps", "1,2"]
    page = page_of(tmp_path / "a.html", "qwen3-next-80b-a3b", *options, "--json")
    report = json.loads(capsys.readouterr().out)
    assert numbers(page.column("Requests that fit", "hybridkv"))[-1] == report["max_requests"]
    assert [row[0] for row in page.tables["Groups"][1:]] == [group["name"] for group in report["groups"]]
    page = page_of(tmp_path / "b.html", "gpt-oss-120b", "--compare")
    assert "gpt-oss-120b" in capsys.readouterr().out
    assert any(caption.startswith("80 GiB a rank") for caption in page.tables)


def test_a_file_that_is_there_is_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "page.html", tmp_path / "link.html"
    path.write_text("old " * 100_000)
    path.chmod(0o640)
    link.symlink_to(path)
    page_of(link, "gpt-oss-120b")
    assert link.is_symlink()
    assert path.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.html", "page.html"]


def refused(capsys: pytest.CaptureFixture[str], path: Path | str, words: str, code: int = 2) -> None:
    assert run(["plan", "gpt-oss-120b", "--html", str(path)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hybridkv: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_paths_that_cannot_be_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("old")
    refused(capsys, tmp_path, "is a directory")
    refused(capsys, tmp_path / "none/page.html", "no directory")
    refused(capsys, tmp_path / "file/page.html", "no directory")
    refused(capsys, tmp_path / ("x" * 300), "too long")
    refused(capsys, "/dev/null", "no regular file")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_protected_places_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o444)
    refused(capsys, tmp_path / "file", "write-protected")
    tmp_path.chmod(0o555)
    refused(capsys, tmp_path / "page.html", "Permission denied")
    tmp_path.chmod(0o755)


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EACCES, 2), (errno.EROFS, 2)])
def test_a_write_that_fails_leaves_the_old_file(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr("hybridkv.cli.output_file.os.fsync", fails)
    refused(capsys, path, os.strerror(number), code)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]
