"""Bandwidth of the link between two processes, against one plain NIXL write of as many bytes, in turn.

Ours is timed from `Consumer.claim` until all parcels have landed and were verified; the plain write from posting until
its message is in the other process. Both use the same processes and the same arenas.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from link_child import Child
from link_sides import ENVIRONMENT, Receiver, Sender, Sent
from rich.console import Console
from rich.table import Table

from hybridkv.link.parcels import PARCEL_BYTES

KIB, MIB = 1 << 10, 1 << 20
PAGES = (64 * KIB, 256 * KIB, MIB)
TCP = "tcp,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp"
"""NIXL refuses to start without a transport for the memory of GPUs that the machine has."""
TRANSPORTS: Mapping[str, Mapping[str, str]] = {"cma": {}, "tcp": {"UCX_TLS": TCP}}
ORDERS = ("in order", "at random")
PARCELS = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
WINDOWS = (1, 2, 3, 8)
DEFAULT_PARCEL, DEFAULT_WINDOW = PARCEL_BYTES, 3


class Sizes(NamedTuple):
    arena_bytes: int
    sent_bytes: int
    repeats: int


FULL = Sizes(512 * MIB, 192 * MIB, 5)
QUICK = Sizes(256 * MIB, 64 * MIB, 3)


class Pair:
    """A sender and a receiver that know each other."""

    def __init__(self, sender: Child, receiver: Child, page_bytes: int, sizes: Sizes) -> None:
        self.sender, self.receiver = sender, receiver
        self.page_bytes, self.sizes = page_bytes, sizes
        metadata, _, self._num_pages = sender.call("card")
        theirs, self._base, _ = receiver.call("card")
        sender.call("meet", theirs)
        receiver.call("meet", metadata)
        self._numbers = count()
        self._random = np.random.default_rng(7)

    @property
    def sent_bytes(self) -> int:
        return self.sizes.sent_bytes

    def plain(self) -> float:
        self.receiver.begin("await_plain")
        began = self.sender.call("write", self._base, self.sent_bytes)
        return Sent(began, self.receiver.end()).seconds

    def ours(self, order: str, *, verify: bool = False) -> tuple[float, int]:
        """Seconds and descriptors. `verify`: compare all bytes afterwards."""
        request_id = f"transfer-{next(self._numbers)}"
        source, target = self._pages(order), self._pages(order)
        if verify:
            self.receiver.call("clear")
        self.sender.call("offer", request_id, source)
        sent, descriptors = self.receiver.call("receive", request_id, target)
        if verify:
            assert self.sender.call("digest", source) == self.receiver.call("digest", target), "bytes differ"
        return sent.seconds, descriptors

    def _pages(self, order: str) -> list[int]:
        pages = np.arange(1, self.sent_bytes // self.page_bytes + 1)
        if order == "at random":
            pages = self._random.permutation(self._num_pages - 1)[: len(pages)] + 1
        return [int(page) for page in pages]


@contextmanager
def pair(transport: str, page_bytes: int, sizes: Sizes) -> Iterator[Pair]:
    env = {**TRANSPORTS[transport], **ENVIRONMENT}
    with ExitStack() as stack:
        sender = stack.enter_context(Child("sender", Sender, page_bytes, sizes.arena_bytes, env=env))
        port = sender.call("port")
        receiver = stack.enter_context(Child("receiver", Receiver, page_bytes, sizes.arena_bytes, port, env=env))
        found = Pair(sender, receiver, page_bytes, sizes)
        for _ in range(2):  # connections, and pages that were not touched yet
            found.plain()
        yield found


def run(sizes: Sizes, pages: Sequence[int] = PAGES) -> list[dict[str, Any]]:
    rows = []
    for transport in TRANSPORTS:
        for page_bytes in pages:
            print(f"transfer: {transport}, pages of {page_bytes // KIB} KiB", file=sys.stderr)
            with pair(transport, page_bytes, sizes) as both:
                for order in ORDERS:
                    rows += [_row(transport, both, order, checksums=checksums) for checksums in (False, True)]
    return rows


def _row(transport: str, both: Pair, order: str, *, checksums: bool) -> dict[str, Any]:
    both.sender.call("set", checksums=checksums)
    both.ours(order, verify=True)
    before = both.sender.call("seconds"), both.receiver.call("seconds")
    plain, ours, descriptors = [], [], 0
    for _ in range(both.sizes.repeats):
        plain.append(both.plain())
        seconds, descriptors = both.ours(order)
        ours.append(seconds)
    kib = both.sent_bytes / KIB * both.sizes.repeats
    after = both.sender.call("seconds"), both.receiver.call("seconds")
    plain_s, ours_s = statistics.median(plain), statistics.median(ours)
    return {
        "transport": transport,
        "page_kib": both.page_bytes // KIB,
        "order": order,
        "checksums": checksums,
        "run_kib": both.sent_bytes // KIB // descriptors,
        "descriptors": descriptors,
        "ours_gb_per_s": round(both.sent_bytes / ours_s / 1e9, 3),
        "plain_gb_per_s": round(both.sent_bytes / plain_s / 1e9, 3),
        "ratio": round(plain_s / ours_s, 3),
        "checksum_ns_per_kib": round((after[0].get("checksum", 0) - before[0].get("checksum", 0)) / kib * 1e9, 1),
        "verify_ns_per_kib": round((after[1].get("verify", 0) - before[1].get("verify", 0)) / kib * 1e9, 1),
    }


def show(console: Console, rows: Sequence[Mapping[str, Any]], sizes: Sizes) -> None:
    title = f"{sizes.sent_bytes // MIB} MiB between two processes, medians of {sizes.repeats}"
    table = Table(title=title, caption="ratio: plain write's time / ours. ns: time for each KiB, sender / receiver")
    for column in ("transport", "page KiB", "pages", "runs KiB", "descriptors", "checksums", "ours GB/s", "plain GB/s"):
        table.add_column(column, justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("target", justify="right")
    table.add_column("checksum ns/KiB", justify="right")
    for row in rows:
        goal = target_of(row)
        table.add_row(
            row["transport"],
            str(row["page_kib"]),
            row["order"],
            str(row["run_kib"]),
            str(row["descriptors"]),
            "yes" if row["checksums"] else "no",
            f"{row['ours_gb_per_s']:.2f}",
            f"{row['plain_gb_per_s']:.2f}",
            f"{row['ratio']:.2f}",
            "" if goal is None else f"{goal:.1f}",
            f"{row['checksum_ns_per_kib']:.0f} / {row['verify_ns_per_kib']:.0f}" if row["checksums"] else "",
        )
    console.print(table)


def target_of(row: Mapping[str, Any]) -> float | None:
    """The ratio to reach: where runs have 1 MiB or more, and for runs of 64 KiB by tcp; without checksums."""
    if row["checksums"]:
        return None
    if row["run_kib"] >= 1024:
        return 0.8
    return 0.6 if row["run_kib"] == 64 and row["transport"] == "tcp" else None


# --- constants --------------------------------------------------------------------------------------------------------


def tune(sizes: Sizes, parcels: Sequence[int] = PARCELS, windows: Sequence[int] = WINDOWS) -> list[dict[str, Any]]:
    """Other sizes of parcels, and other numbers of writes in progress, without checksums and with them."""
    rows = []
    settings = [(size, DEFAULT_WINDOW) for size in parcels] + [(DEFAULT_PARCEL, one) for one in windows]
    for transport in TRANSPORTS:
        print(f"tune: {transport}", file=sys.stderr)
        with pair(transport, 64 * KIB, sizes) as both:
            for order in ORDERS:
                for checksums in (False, True):
                    rows += _tuned(transport, both, order, dict.fromkeys(settings), checksums=checksums)
    return rows


def _tuned(
    transport: str, both: Pair, order: str, settings: Mapping[tuple[int, int], None], *, checksums: bool
) -> list[dict[str, Any]]:
    """All settings in turn, several times over: what else the machine does hits all of them alike."""
    times: dict[tuple[int, int], list[float]] = {one: [] for one in settings}
    plain = []
    for _ in range(both.sizes.repeats):
        plain.append(both.plain())
        for parcel_bytes, window in settings:
            both.sender.call("set", checksums=checksums, parcel_bytes=parcel_bytes, window=window)
            times[parcel_bytes, window].append(both.ours(order)[0])
    both.sender.call("set", checksums=checksums, parcel_bytes=DEFAULT_PARCEL, window=DEFAULT_WINDOW)
    plain_s = statistics.median(plain)
    return [
        {
            "transport": transport,
            "order": order,
            "checksums": checksums,
            "parcel_mib": parcel_bytes // MIB,
            "window": window,
            "ratio": round(plain_s / statistics.median(seconds), 3),
        }
        for (parcel_bytes, window), seconds in times.items()
    ]


def show_tuned(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    cases = list(dict.fromkeys((row["transport"], row["order"], row["checksums"]) for row in rows))
    table = Table(title="pages of 64 KiB: ratio to a plain write, by parcel size and writes in progress")
    table.add_column("parcel MiB", justify="right")
    table.add_column("window", justify="right")
    for transport, order, checksums in cases:
        table.add_column(f"{transport}, {order}{', checksums' if checksums else ''}", justify="right")
    for setting in dict.fromkeys((row["parcel_mib"], row["window"]) for row in rows):
        found = [row for row in rows if (row["parcel_mib"], row["window"]) == setting]
        table.add_row(str(setting[0]), str(setting[1]), *(f"{row['ratio']:.2f}" for row in found))
    console.print(table)
