"""Tiers of replays as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from hybridkv.replay import LoadReport, ReplayReport, Setting
from hybridkv.units import format_bytes


def policy_text(setting: Setting) -> str:
    """The policy, and what else decides which checkpoints there are."""
    states = [setting.state_dtype] if setting.state_dtype else []
    return ", ".join([setting.policy, *states, *([] if setting.breakpoints else ["no breakpoints"])])


def tiers_table(report: ReplayReport) -> Table:
    """One line a tier."""
    table = Table(title="Tiers", title_justify="left")
    table.add_column("tier")
    for header in ("size", "bandwidth", "latency", "peak", "read", "written", "evicted"):
        table.add_column(header, justify="right")
    for number, tier in enumerate(report.tiers, 1):
        table.add_row(
            str(number),
            format_bytes(tier.size_bytes),
            f"{tier.bytes_per_s / 1e9:.3g} GB/s",
            f"{tier.latency_s * 1e3:g} ms",
            format_bytes(tier.peak_bytes),
            format_bytes(tier.read_bytes),
            format_bytes(tier.written_bytes),
            f"{tier.evicted:,}",
        )
    return table


def loads_remark(loads: LoadReport) -> str:
    """What became of loads that are slow."""
    parts = [] if loads.slower is None else [f"{loads.slower:,} took longer than computing"]
    if loads.declined:
        parts.append(f"{loads.declined:,} more would have")
    if loads.timeouts:
        parts.append(f"{loads.timeouts:,} were given up")
    return ", ".join(parts)


def tier_sweep_table(reports: Sequence[ReplayReport], title: str) -> Table:
    """One line a replay, with the figures of its last tier: the one whose size a sweep changes."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column("memory", justify="right")
    table.add_column("policy")
    headers = ("TP", "block", "last tier", "peak", "read", "written", "from tiers", "hit ratio", "TTFT p50")
    for header in headers:
        table.add_column(header, justify="right")
    for report in reports:
        setting, last = report.setting, report.tiers[-1]
        loaded = report.hit_tokens - report.memory_tokens
        table.add_row(
            format_bytes(setting.memory_bytes),
            Text(policy_text(setting)),
            str(setting.tp),
            str(setting.block_tokens),
            format_bytes(last.size_bytes),
            format_bytes(last.peak_bytes),
            format_bytes(last.read_bytes),
            format_bytes(last.written_bytes),
            f"{loaded / report.input_tokens:.2%}",
            f"{report.hit_ratio:.2%}",
            "-" if report.ttft_s is None else f"{report.ttft_s['p50']:.3g} s",
        )
    return table
