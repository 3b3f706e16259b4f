"""The link between engines that compute prompts and engines that continue them, in four parts.

plan      bytes and descriptors of a prompt for large models, from their plans
transfer  bandwidth between two processes, by CMA and by tcp, against one plain NIXL write
tokens    small models: bytes received, time to the second token, pace of replies; two engines against one
tune      the transfer with other parcel sizes and other numbers of writes in progress; only if it is asked for

    python benchmarks/link.py [--quick] [--only plan,transfer,tokens,tune]

On a machine with two cores the sender, the receiver and the kernel share them: read ratios. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from typing import Any

import link_plan
import link_transfer
from rich.console import Console

PARTS = ("plan", "transfer", "tokens", "tune")
USUAL = "plan,transfer,tokens"


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sizes = link_transfer.QUICK if args.quick else link_transfer.FULL
    if "plan" in args.only:
        found["plan"] = link_plan.run()
        link_plan.show(console, found["plan"])
    if "transfer" in args.only:
        found["transfer"] = link_transfer.run(sizes, link_transfer.PAGES[:1] if args.quick else link_transfer.PAGES)
        link_transfer.show(console, found["transfer"], sizes)
    if "tune" in args.only:
        found["tune"] = link_transfer.tune(sizes)
        link_transfer.show_tuned(console, found["tune"])
    if "tokens" in args.only:
        import link_tokens

        found["tokens"] = link_tokens.run(quick=args.quick)
        link_tokens.show(console, found["tokens"])
    return found


def _parts(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Fewer and smaller transfers and prompts.")
    parser.add_argument("--only", type=_parts, default=_parts(USUAL), help=f"Parts, with commas; default: {USUAL}.")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    load, began = os.getloadavg()[0], time.perf_counter()
    machine = f"{platform.machine()} CPU, {os.cpu_count()} cores, no GPU is used"
    console.print(f"{machine}; load average at the start: {load:.1f}")
    found = run(args, console)
    report = {
        "benchmark": "link",
        "device": machine,
        "cores": os.cpu_count(),
        "load_at_start": round(load, 2),
        "quick": args.quick,
        "seconds": round(time.perf_counter() - began, 1),
        **found,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
