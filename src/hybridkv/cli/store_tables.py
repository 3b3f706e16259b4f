"""Stores as tables that people like to read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hybridkv.store import Stored
from hybridkv.units import format_bytes

_SHOWN_ELSEWHERE = ("model", "weights", "groups", "layout")


def stat_tables(url: str, stored: Sequence[Stored], about: Mapping[str, Mapping[str, str]], unfinished: int) -> Group:
    """One line a group, under what its namespace is called."""
    table = Table(title=Text(url), title_justify="left")
    table.add_column("model")
    table.add_column("namespace")
    table.add_column("group")
    for header in ("objects", "size", "last used"):
        table.add_column(header, justify="right")
    by_group: defaultdict[tuple[str, str], list[Stored]] = defaultdict(list)
    for one in stored:
        by_group[one.name.namespace, one.name.group].append(one)
    shown = ""
    for (namespace, group), found in sorted(by_group.items()):
        info = about.get(namespace, {})
        first = namespace != shown
        shown = namespace
        table.add_row(
            Text(_called(namespace, info) if first else ""),
            namespace if first else "",
            group,
            f"{len(found):,}",
            format_bytes(sum(one.nbytes for one in found)),
            _ago(max(one.used_at for one in found)),
        )
    total = f"{len(stored):,} objects, {format_bytes(sum(one.nbytes for one in stored))}"
    return Group(table, total + (f"; {format_bytes(unfinished)} being written or left over" if unfinished else ""))


def listing_tables(stored: Sequence[Stored], about: Mapping[str, Mapping[str, str]], limit: int) -> Group:
    """One table a namespace."""
    tables: dict[str, Table] = {}
    for one in stored[:limit]:
        table = tables.get(one.name.namespace)
        if table is None:
            title = f"{_called(one.name.namespace, about.get(one.name.namespace, {}))}  {one.name.namespace}"
            table = tables[one.name.namespace] = Table(title=Text(title), title_justify="left")
            table.add_column("group")
            table.add_column("key", no_wrap=True)
            for header in ("size", "tokens", "value", "used"):
                table.add_column(header, justify="right")
        table.add_row(
            one.name.group,
            one.name.key,
            format_bytes(one.nbytes),
            "-" if one.position is None else f"{one.position:,}",
            "-" if one.value is None else f"{one.value:.3g}",
            _ago(one.used_at),
        )
    hidden = len(stored) - limit
    more = f"and {hidden:,} more: give a higher --limit" if hidden > 0 else f"{len(stored):,} objects"
    return Group(*tables.values(), more)


def _called(namespace: str, info: Mapping[str, str]) -> str:
    """The model's name, or the digest there is; then what else is known and not shown beside it."""
    name = info.get("model") or info.get("weights") or namespace
    return ", ".join([name, *(text for key, text in info.items() if key not in _SHOWN_ELSEWHERE)])


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
