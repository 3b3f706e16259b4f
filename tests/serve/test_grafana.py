"""examples/grafana: every metric and label in the board is one that a server exports."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from hybridkv import Engine
from hybridkv.link.link import LinkOptions
from hybridkv.link.stats import LinkStats
from hybridkv.serve import HiddenFolder
from hybridkv.serve.metrics import _link_metrics, _stream_metrics
from hybridkv.stream import StreamStats
from tests.engine.zoo import prompt
from tests.serve.serving import serving

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "examples/grafana/hybridkv.json").read_text(encoding="utf-8")
)
TARGET_LABELS = {"job", "instance"}
"""Prometheus adds these to every sample that it scrapes."""
_METRIC = re.compile(r"(hybridkv_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*=~?\s*\"")
_BY = re.compile(r"by \(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def panels() -> list[dict[str, Any]]:
    """All panels but rows, those of collapsed rows too."""
    inner = [panel for row in BOARD["panels"] for panel in row.get("panels", [])]
    return [panel for panel in [*BOARD["panels"], *inner] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str]]:
    """Each query with its legend."""
    return [(target["expr"], target["legendFormat"]) for panel in panels() for target in panel["targets"]]


def labels_of(text: str) -> dict[str, set[str]]:
    """Names of samples in Prometheus' format, with the names of their labels."""
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        if family.type == "counter":
            found[f"{family.name}_total"] |= set()  # without samples where its label has no value yet
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


class _Troubles(Collector):
    """What only failures and transfers have labels of: counted here without any."""

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from _stream_metrics(StreamStats(failures=Counter(timeout=1)))
        yield from _link_metrics(LinkStats(failures=Counter(timeout=1), seconds=defaultdict(float, push=1.0)))


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """By a server with a store, a link and a directory of hidden states that has answered some requests."""
    directory = tmp_path_factory.mktemp("grafana")
    (directory / "secret").write_text("a secret of two servers")
    link = LinkOptions(role="prefill", secret_file=directory / "secret")
    with (
        Engine(checkpoint, memory="16MiB", device="cpu", store="memory://?size=16MiB", link=link) as engine,
        serving(engine, hidden_folder=HiddenFolder(directory / "hidden")) as served,
    ):
        for _ in range(2):
            reply = served.post("/v1/completions", prompt=prompt(80, 7), max_tokens=4, ignore_eos=True)
            assert reply.status_code == 200
            engine.flush_store()
            engine.reset_cache()  # so that the second one loads
        found = labels_of(served.http.get("/metrics").text)
    assert "mode" in found["hybridkv_stream_loads_total"]
    registry = CollectorRegistry()
    registry.register(_Troubles())
    for name, labels in labels_of(generate_latest(registry).decode()).items():
        found[name] |= labels if name in found else set()
    return found


def test_every_metric_and_label_is_exported(exported: dict[str, set[str]]) -> None:
    for expression, legend in expressions():
        used = _METRIC.findall(expression)
        assert used, expression
        for name, matchers in used:
            assert name in exported, f"{name} in {expression}"
            labels = set(_MATCHER.findall(matchers))
            assert labels >= TARGET_LABELS, expression
            assert labels <= exported[name] | TARGET_LABELS, expression
        groups = {label.strip() for by in _BY.findall(expression) for label in by.split(",")}
        assert groups <= set().union(*(exported[name] for name, _ in used)), expression
        assert set(_LEGEND.findall(legend)) <= groups, expression


def test_a_kind_of_metric_is_read_as_such(exported: dict[str, set[str]]) -> None:
    """Counters as rates, gauges as they are, histograms as quantiles of their buckets."""
    for expression, _ in expressions():
        for name, matchers in _METRIC.findall(expression):
            selector = f"{name}{{{matchers}}}"
            is_counted = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert (f"rate({selector}[$__rate_interval])" in expression) == is_counted, expression
            assert name.endswith("_bucket") == ("histogram_quantile(" in expression), expression
        assert expression.count("(") == expression.count(")")


def test_every_part_of_the_server_is_on_the_board(exported: dict[str, set[str]]) -> None:
    shown = {name for expression, _ in expressions() for name, _ in _METRIC.findall(expression)}
    labelled = {name for name, labels in exported.items() if labels - {"le"}}
    assert {name for name in labelled if name.startswith("hybridkv_") and not name.endswith("_created")} <= shown
    for name in ("time_to_first_token", "time_per_output_token", "queue", "request"):
        assert f"hybridkv_{name}_seconds_bucket" in shown
    for name in ("cache_hit_tokens", "cache_checkpoints_kept", "cache_blocks_evicted", "preemptions", "store_faults"):
        assert f"hybridkv_{name}_total" in shown


def test_the_data_source_is_a_variable() -> None:
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    sources = [panel["datasource"] for panel in panels()]
    sources += [target["datasource"] for panel in panels() for target in panel["targets"]]
    sources += [variables[name]["datasource"] for name in ("job", "instance")]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert (BOARD["id"], BOARD["uid"]) == (None, None)


def test_panels_have_units_words_and_places_of_their_own() -> None:
    everything = [*BOARD["panels"], *(panel for row in BOARD["panels"] for panel in row.get("panels", []))]
    ids = [panel["id"] for panel in everything]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert {panel["type"] for panel in panels()} <= {one["id"] for one in BOARD["__requires"]}
