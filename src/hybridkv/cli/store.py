"""`hybridkv store`: what lies in a store, whether it is whole, and making it smaller."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hybridkv.cli.store_tables import listing_tables, stat_tables
from hybridkv.cli.tables import console, write
from hybridkv.errors import InputError
from hybridkv.store import (
    CorruptObject,
    MissingObject,
    ObjectName,
    Reader,
    Store,
    Stored,
    StoreError,
    UnknownFormat,
    inspect_store,
)
from hybridkv.units import format_bytes, parse_size

store_app = typer.Typer(
    help="Look into a store of cache objects, check it, and clean it up.", no_args_is_help=True, rich_markup_mode="rich"
)

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="The store: file:///path, valkey://host, s3://bucket. No size is needed.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
NamespaceOption = Annotated[str | None, typer.Option(help="Only this namespace: 32 hex digits, as 'stat' shows them.")]
GroupOption = Annotated[str | None, typer.Option(help="Only this group: full, state ...")]

_TABLE_LINES = 100
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@store_app.command("stat")
def stat_command(url: UrlArgument, as_json: JsonOption = False) -> None:
    """Sizes by model and group."""
    with inspect_store(url) as store:
        stored, about, stats = _listed(store), store.descriptions(), store.stats
    if as_json:
        write(json.dumps(_stat_record(url, stored, about), indent=2))
    else:
        console().print(stat_tables(url, stored, about, max(0, stats.nbytes - sum(one.nbytes for one in stored))))


@store_app.command("ls")
def ls_command(
    url: UrlArgument,
    namespace: NamespaceOption = None,
    group: GroupOption = None,
    older_than: Annotated[str | None, typer.Option(help="Only those not used for so long: 90s, 12h, 7d.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Show at most so many. Default: {_TABLE_LINES}, with --json all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List objects, those used last first."""
    before = time.time() - _duration(older_than) if older_than else math.inf  # clocks of servers may be ahead
    with inspect_store(url) as store:
        found = [one for one in _listed(store, namespace, group, headers=True) if one.used_at <= before]
        about = store.descriptions()
    found.sort(key=lambda one: (-one.used_at, one.name))
    if as_json:
        write(json.dumps([_object_record(one, about) for one in found[:limit]], indent=2))
    else:
        console().print(listing_tables(found, about, limit or _TABLE_LINES))


@store_app.command("verify")
def verify_command(
    url: UrlArgument,
    namespace: NamespaceOption = None,
    group: GroupOption = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is corrupt.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every row of every object. Exit code 1 if something is corrupt.

    Objects of a later version of hybridkv are counted and left alone.
    """
    with inspect_store(url) as store:
        stored = _listed(store, namespace, group)
        troubles = _verify_all(store, stored)
        corrupt = {name: str(trouble) for name, trouble in troubles.items() if isinstance(trouble, CorruptObject)}
        unknown = {name: str(trouble) for name, trouble in troubles.items() if isinstance(trouble, UnknownFormat)}
        if delete:
            store.delete(list(corrupt))
    if as_json:
        found = {"corrupt": _trouble_records(corrupt), "unknown": _trouble_records(unknown)}
        write(json.dumps({"url": url, "objects": len(stored), **found, "deleted": delete}, indent=2))
    else:
        for text in corrupt.values():
            write(text)
        end = "" if not corrupt else ", now deleted" if delete else ": --delete removes them"
        write(f"{len(stored) - len(unknown):,} objects read, {len(corrupt):,} corrupt{end}")
        if unknown:
            write(f"{len(unknown):,} objects of an unknown format, left alone; one is {min(unknown.values())}")
    if corrupt:
        raise typer.Exit(1)


@store_app.command("gc")
def gc_command(
    url: UrlArgument,
    size: Annotated[str | None, typer.Option(help="Evict until at most so much is used: 100GiB.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Remove what was not used for so long: 90s, 12h, 7d.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what writers that died have left; with options, objects too."""
    goal = None if size is None else parse_size(size)
    before = None if older_than is None else time.time() - _duration(older_than)
    with inspect_store(url) as store:
        used = store.stats.nbytes
        with _at_work("looking for leftovers"):
            leftovers = store.collect()
        old = [] if before is None else [one.name for one in _listed(store) if one.used_at < before]
        with _at_work("removing objects"):
            expired = store.delete(old)
            evicted = 0 if goal is None else store.shrink(goal)
        left = store.stats.nbytes
    record = {
        "leftovers": leftovers.files,
        "expired": expired,
        "evicted": evicted,
        "freed": used - left,
        "nbytes": left,
    }
    if as_json:
        write(json.dumps({"url": url, **record}, indent=2))
    else:
        kept = "" if size or older_than else ". Objects are kept: --older-than and --size remove some"
        write(
            f"{leftovers.files:,} leftovers of dead writers, {expired:,} old and {evicted:,} other objects removed: "
            f"{format_bytes(used - left)} freed, {format_bytes(left)} left{kept}"
        )


def _verify_all(store: Store, stored: list[Stored]) -> dict[ObjectName, StoreError]:
    troubles = {}
    with _progress() as bar:
        task = bar.add_task("verify", total=sum(one.nbytes for one in stored))
        for start in range(0, len(stored), store.opens_together):
            batch = stored[start : start + store.opens_together]
            for one, found in zip(batch, store.open_all([one.name for one in batch]), strict=True):
                trouble = _verify(found)
                if trouble is not None:
                    troubles[one.name] = trouble
                bar.advance(task, one.nbytes)
    return troubles


def _verify(found: Reader | StoreError) -> StoreError | None:
    """The error that opening or reading the object raises. An object that is deleted meanwhile is fine."""
    try:
        if isinstance(found, StoreError):
            raise found
        with found as reader:
            buffer = memoryview(bytearray(max(row.nbytes for row in reader.header.rows)))
            for number, row in enumerate(reader.header.rows):
                reader.read(number, [buffer[: row.nbytes]])
    except MissingObject:
        return None
    except (CorruptObject, UnknownFormat) as error:
        return error
    return None


def _listed(
    store: Store, namespace: str | None = None, group: str | None = None, *, headers: bool = False
) -> list[Stored]:
    found: list[Stored] = []
    with _at_work("listing objects") as bar:
        task = bar.tasks[0].id
        for one in store.objects(namespace, group, headers=headers):
            found.append(one)
            bar.update(task, description=f"listing objects: {len(found):,}")
    return found


def _trouble_records(troubles: dict[ObjectName, str]) -> list[dict[str, str]]:
    return [{"name": str(name), "error": text} for name, text in troubles.items()]


def _stat_record(url: str, stored: list[Stored], about: dict[str, dict[str, str]]) -> dict[str, object]:
    groups: dict[str, dict[str, dict[str, int]]] = {}
    for one in stored:
        counts = groups.setdefault(one.name.namespace, {}).setdefault(one.name.group, {"objects": 0, "nbytes": 0})
        counts["objects"] += 1
        counts["nbytes"] += one.nbytes
    spaces = {space: {"about": about.get(space, {}), "groups": found} for space, found in groups.items()}
    return {"url": url, "objects": len(stored), "nbytes": sum(one.nbytes for one in stored), "namespaces": spaces}


def _object_record(one: Stored, about: dict[str, dict[str, str]]) -> dict[str, object]:
    model = about.get(one.name.namespace, {}).get("model")
    record = {"model": model, "namespace": one.name.namespace, "group": one.name.group, "key": one.name.key}
    return {**record, "nbytes": one.nbytes, "used_at": one.used_at, "value": one.value, "position": one.position}


def _duration(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    if match is None:
        raise InputError(f"{text!r} is not a span of time: write it as 90s, 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on stderr, if that is a terminal."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=screen, disable=not screen.is_terminal, transient=True
    ) as bar:
        yield bar


@contextmanager
def _at_work(text: str) -> Iterator[Progress]:
    """A line on stderr, if that is a terminal, while something goes on whose end is not known."""
    screen = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        bar.add_task(text, total=None)
        yield bar
