"""What docs/server.md says is so: its example runs, its tables name what there is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from hybridkv import Engine
from hybridkv.cli.main import app
from hybridkv.demo import demo_model
from hybridkv.link.link import LinkOptions
from hybridkv.serve import HiddenFolder, ServeOptions, Server, make_app
from hybridkv.serve.inspection_replies import RecordReply, RecordSummary
from hybridkv.units import parse_size
from tests.serve.serving import Served, serving

PAGE = (Path(__file__).parents[2] / "docs/server.md").read_text(encoding="utf-8")


def table(header: str) -> Iterator[list[str]]:
    """The cells of the rows of the table whose header begins so."""
    lines = iter(PAGE.splitlines())
    assert any(line.startswith(f"| {header} |") for line in lines), header
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split(" |")]


def example(first_line: str) -> str:
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    [found] = [block for block in blocks if block.startswith(first_line)]
    return found


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine(demo_model(), memory="64MiB", device="cpu") as engine:
        yield engine


def test_a_client_sees_what_the_page_says(demo: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(demo, served_model_name="hybridkv-demo") as served:
        exec(compile(example("from openai").replace("http://127.0.0.1:8000", served.url), "docs/server.md", "exec"), {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"[1-9]\d* of \d+ cached", last)
    assert f"`{last}`" in PAGE


def test_a_server_in_python_runs(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but loading the model, and waiting for a signal."""
    block = example("from hybridkv import Engine")
    for name in ("Server(", "make_app(", "ServeOptions(", "server.run(app, shutdown_timeout=5, on_ready="):
        assert name in block
    server = Server("127.0.0.1", 0)
    server.run(make_app(demo, ServeOptions("demo", api_keys=("secret",))), shutdown_timeout=5, on_ready=server.stop)


def test_every_option_is_listed_with_its_default() -> None:
    command: Any = typer.main.get_command(app)
    found = {
        name: parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
        for parameter in command.commands["serve"].params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--") and name != "--help"
    }
    listed: dict[str, str] = {}
    for cell, defaults, *_ in table("option"):
        names = re.findall(r"`(--[\w-]+)`", cell)
        values = [value.strip() for value in defaults.split(",")]
        listed.update(zip(names, values * len(names) if len(values) < len(names) else values, strict=False))
    assert set(listed) == set(found)
    for name, default in found.items():
        assert default in (None, False) or listed[name] == ("yes" if default is True else str(default)), name


def test_defaults_that_the_command_only_shows_are_those_of_the_directory() -> None:
    command: Any = typer.main.get_command(app)
    shown = {parameter.name: parameter.show_default for parameter in command.commands["serve"].params}
    limits = inspect.signature(HiddenFolder).parameters
    assert parse_size(shown["hidden_states_size"]) == limits["max_bytes"].default
    assert float(shown["hidden_states_ttl"]) == limits["ttl_s"].default


def test_every_endpoint_is_listed(served: Served) -> None:
    described = served.http.get("/openapi.json").json()["paths"]
    paths = {re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), path) for path in described}
    listed = {path for cell, *_ in table("endpoint") for path in re.findall(r"(/[\w/]*)", cell)}
    assert listed == paths | {"/", "/docs", "/openapi"}


def test_every_field_is_named(served: Served) -> None:
    schemas = served.http.get("/openapi.json").json()["components"]["schemas"]
    kinds: tuple[str, ...] = ("CompletionRequest", "ChatRequest", "MessagesRequest", "ResponsesRequest", "TokenizeText")
    kinds += ("TokenizeChat", "DetokenizeRequest")
    for kind in kinds:
        missing = [name for name in schemas[kind]["properties"] if f"`{name}" not in PAGE]
        assert not missing


def test_every_field_of_a_record_is_named() -> None:
    page = (Path(__file__).parents[2] / "docs/why.md").read_text(encoding="utf-8")
    kinds: list[type[BaseModel]] = [RecordReply, RecordSummary]
    seen: set[type[BaseModel]] = set()
    while kinds:
        kind = kinds.pop()
        seen.add(kind)
        for name, field in kind.model_fields.items():
            assert f"`{name}`" in page, f"{kind.__name__}.{name}"
            kinds += [one for one in _models(field.annotation) if one not in seen]
    assert len(seen) > 10


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models(one)


def metrics_of(served: Served) -> dict[str, str]:
    """Their kinds, by the names that the page gives them."""
    kinds = {"counter": "_total", "gauge": "", "histogram": ""}
    return {
        family.name.removeprefix("hybridkv_") + kinds[family.type]: family.type
        for family in text_string_to_metric_families(served.http.get("/metrics").text)
        if not family.name.endswith("_created")
    }


def metrics_in(header: str) -> dict[str, str]:
    return {name: kind for cell, kind, *_ in table(header) for name in re.findall(r"`(\w+)(?:\{[\w,]+\})?`", cell)}


def test_every_metric_is_listed(served: Served) -> None:
    assert metrics_in("`hybridkv_...`") == metrics_of(served)


def test_every_metric_of_hidden_states_is_listed(engine: Engine, tmp_path: Path) -> None:
    with serving(engine, hidden_folder=HiddenFolder(tmp_path)) as served:
        found = metrics_of(served)
    assert metrics_in("with `--hidden-states-dir`: `hybridkv_...`") == {
        name: kind for name, kind in found.items() if name.startswith("hidden_states_")
    }


def test_every_metric_of_a_link_is_listed(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of two servers")
    link = LinkOptions(role="prefill", secret_file=tmp_path / "secret")
    with Engine(checkpoint, memory="16MiB", device="cpu", link=link) as engine, serving(engine) as served:
        found = metrics_of(served)
    assert metrics_in("with `--role`: `hybridkv_...`") == {
        name: kind for name, kind in found.items() if name.startswith("link_")
    }


def test_every_metric_of_a_store_is_listed(checkpoint: Path) -> None:
    with (
        Engine(checkpoint, memory="16MiB", device="cpu", store="memory://?size=16MiB") as engine,
        serving(engine) as served,
    ):
        found = metrics_of(served)
    assert metrics_in("with `--store`: `hybridkv_...`") == {
        name: kind for name, kind in found.items() if name.startswith(("stream_", "store_"))
    }
