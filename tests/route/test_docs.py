"""What docs/route.md says of the router is so: its tables name what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from prometheus_client.parser import text_string_to_metric_families

from hybridkv.cli.main import app
from hybridkv.route import RouteOptions
from tests.route.standins import routing, unused_url

PAGE = (Path(__file__).parents[2] / "docs/route.md").read_text(encoding="utf-8")


def rows(header: str) -> Iterator[list[str]]:
    lines = iter(PAGE.splitlines())
    assert any(line.startswith(f"| {header} |") for line in lines), header
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split(" |")]


def test_every_option_is_listed_with_its_default() -> None:
    command: Any = typer.main.get_command(app)
    found = {name: one.default for one in command.commands["route"].params for name in one.opts if name != "--help"}
    listed: dict[str, str] = {}
    for cell, defaults, *_ in rows("option"):
        names = re.findall(r"`(--[\w-]+)`", cell)
        values = [value.strip() for value in defaults.split(",")]
        listed.update(zip(names, values * len(names) if len(values) < len(names) else values, strict=False))
    assert set(listed) == {name for name in found if name.startswith("--")}
    for name, default in found.items():
        assert default in (None, False) or listed[name] == str(default), name


def test_defaults_of_the_command_are_those_of_the_router() -> None:
    options = RouteOptions(("http://x",), ("http://y",))
    assert (options.prefill_timeout_s, options.max_body_bytes, options.rest_s) == (120.0, 16 * 2**20, 5.0)
    assert "skipped for 5 seconds" in PAGE


def test_every_endpoint_and_metric_is_listed() -> None:
    with routing([unused_url()], [unused_url()]) as routed:
        described = routed.http.get("/openapi.json").json()["paths"]
        families = list(text_string_to_metric_families(routed.http.get("/metrics").text))
    listed = {path for cell, *_ in rows("endpoint") for path in re.findall(r"(/[\w/]+)", cell)}
    assert listed == {path.replace("{name}", "NAME") for path in described}
    suffixes = {"counter": "_total", "gauge": "", "histogram": ""}
    found = {
        family.name.removeprefix("hybridkv_route_") + suffixes[family.type]: family.type
        for family in families
        if not family.name.endswith("_created")
    }
    assert found == {
        name: kind
        for cell, kind, *_ in rows("`hybridkv_route_...`")
        for name in re.findall(r"`(\w+)(?:\{[\w,]+\})?`", cell)
    }
