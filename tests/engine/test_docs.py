"""What the pages say is so: examples run as printed, tables name what there is, links and pictures are right."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridkv import Engine, SamplingParams
from hybridkv.cache import CacheStats
from hybridkv.demo import demo_model
from hybridkv.engine import SUPPORTED, Completion, EngineStats, MemoryUse, Metrics, Result, Update
from hybridkv.link.stats import LinkStats
from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.store import StoreStats
from hybridkv.stream import StreamStats
from hybridkv.units import format_bytes
from tests.engine.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[2]
STATED = '"/path/to/checkpoint"'
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def run(page: str, blocks: list[str]) -> None:
    """One after another, as a reader would."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["docs/concepts.md", "docs/python.md", "docs/quickstart.md", "docs/stats.md"])
def test_all_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert examples(page)
    run(page, examples(page))
    printed = capsys.readouterr().out
    stated = {
        "docs/concepts.md": [r"{'full': 135, 'state': 10}"],
        "docs/quickstart.md": [r"[1-9]\d* of \d+(?= prompt tokens)", r"start 1: [1-9]\d* cached"],
        "docs/python.md": [],
        "docs/stats.md": [r"96 of 200 prompt tokens from the cache"],
    }
    for pattern in stated[page]:
        [words] = re.findall(pattern, read(page))
        assert words in printed


def test_a_state_in_a_small_arena_is_cut_as_concepts_says() -> None:
    state = make_plan(load_model("qwen3-next-80b-a3b"), PlanOptions(memory_bytes=2 * 2**30)).group("state")
    shown = f"{format_bytes(state.page_bytes)} x {state.layout.pages}"
    assert f"`hybridkv plan qwen3-next-80b-a3b --memory 2GiB` shows `{shown}`" in read("docs/concepts.md")


def test_examples_of_the_readme_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3_next", tmp_path)
    found = [block for block in examples("README.md") if STATED in block]  # others need a memory of the reader's own
    assert found
    run("README.md", [block.replace(STATED, repr(str(tmp_path))).replace('"2GiB"', '"32MiB"') for block in found])
    assert capsys.readouterr().out


def test_siblings_that_come_at_once_share_as_concepts_says() -> None:
    assert "reports 0, 560, 560 and 560 cached tokens" in " ".join(read("docs/concepts.md").split())
    prompts = [[100 + i for i in range(560)] + [700 + number] * 400 for number in range(4)]
    with Engine(demo_model(), memory="256MiB", device="cpu") as engine:
        results = engine.generate(prompts, SamplingParams(max_tokens=1))
    assert [result.cached_tokens for result in results] == [0, 560, 560, 560]


# --- tables -----------------------------------------------------------------------------------------------------------


def table(page: str, header: str) -> Iterator[list[str]]:
    """The cells of the rows of the table whose header begins so."""
    lines = iter(read(page).splitlines())
    assert any(line.startswith(f"| {header} |") for line in lines), header
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split(" |")]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def stated_defaults(header: str) -> dict[str, object]:
    """Those of a table of docs/python.md; without a default: nothing."""
    found: dict[str, object] = {}
    for cell, default, *_ in table("docs/python.md", header):
        value = ast.literal_eval(default.strip("`")) if default else inspect.Parameter.empty
        found.update(dict.fromkeys(names(cell), value))
    return found


def test_every_option_of_the_engine_is_listed_with_its_default() -> None:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(Engine).parameters
    assert stated_defaults("option") == {name: one.default for name, one in parameters.items()}


def test_every_sampling_parameter_is_listed_with_its_default() -> None:
    params = SamplingParams()
    real = {field.name: getattr(params, field.name) for field in dataclasses.fields(SamplingParams)}
    assert stated_defaults("field") == real


@pytest.mark.parametrize("kind", [Result, Completion, Metrics, Update])
def test_every_field_of_what_comes_back_is_listed(kind: type[Any]) -> None:
    listed = [name for cell, *_ in table("docs/python.md", f"`{kind.__name__}`") for name in names(cell)]
    properties = [name for name, value in vars(kind).items() if isinstance(value, property)]
    assert sorted(listed) == sorted([*(field.name for field in dataclasses.fields(kind)), *properties])


@pytest.mark.parametrize("kind", [EngineStats, CacheStats, MemoryUse, StreamStats, StoreStats, LinkStats])
def test_every_counter_is_listed_and_no_other(kind: type[Any]) -> None:
    rows = list(table("docs/stats.md", f"`{kind.__name__}`"))
    assert [name for cell, *_ in rows for name in names(cell)] == [field.name for field in dataclasses.fields(kind)]
    assert all(meaning for _, meaning, *_ in rows)


def test_every_model_of_the_engine_is_listed() -> None:
    listed = [name for cell, *_ in table("docs/models.md", "`model_type`") for name in names(cell)]
    assert sorted(listed) == sorted(SUPPORTED)
    assert f"these types, {len(SUPPORTED)} in all" in read("docs/models.md")


# --- links and pictures -----------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Of headings, as they are shown on the web."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", read(page)):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_source_are_where_pages_say(page: str) -> None:
    homes = [ROOT, ROOT / "src/hybridkv", ROOT / "tests"]
    for name in re.findall(r"`(\w[\w.-]*/[\w./-]+\.py)`", read(page)):
        assert any((home / name).is_file() for home in homes) or list(ROOT.glob(f"src/hybridkv/*/{name}")), name


def test_pictures_show_what_the_plan_and_the_cache_say() -> None:
    drawn: dict[str, str] = runpy.run_path(str(ROOT / "docs/img/draw.py"))["draw_all"]()
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/img").glob("*.svg")}
