"""Replays as tables that people like to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hybridkv.cli.replay_tier_tables import loads_remark, policy_text, tier_sweep_table, tiers_table
from hybridkv.replay import ReplayReport
from hybridkv.units import format_bytes

_REASONS = {
    "never_seen": "no earlier request had them",
    "kv_evicted": "seen before; their KV was evicted",
    "state_missing": "KV matched; no state to resume from was kept there",
    "window_missing": "KV matched; the window before it is gone",
    "tap_missing": "KV matched; hidden states are missing",
    "below_block": "seen before, in a block that is not full, or the last token of a prompt",
    "refused": "the request can never fit",
}


def report_tables(report: ReplayReport) -> Group:
    """One replay."""
    tiers = [tiers_table(report)] if report.tiers else []
    return Group(_heading(report), _tokens_table(report), *tiers, _facts_table(report), _percentiles_table(report), "")


def sweep_table(reports: Sequence[ReplayReport]) -> Table:
    """One line a replay."""
    first = reports[0].setting
    title = f"{first.trace} on {first.model}, {_mode(reports[0])}"
    if first.tiers:
        return tier_sweep_table(reports, title)
    table = Table(title=Text(title), title_justify="left")
    table.add_column("memory", justify="right")
    table.add_column("policy")
    headers = ("TP", "block", "hit ratio", "evicted", "no state", "recomputed", "checkpoints", "refused", "seconds")
    for header in headers:
        table.add_column(header, justify="right")
    for report in reports:
        setting = report.setting
        table.add_row(
            format_bytes(setting.memory_bytes),
            Text(policy_text(setting)),
            str(setting.tp),
            str(setting.block_tokens),
            f"{report.hit_ratio:.2%}",
            _part(report, report.misses["kv_evicted"]),
            _part(report, report.misses["state_missing"]),
            f"{report.recomputed_tokens:,}",
            f"{report.checkpoints_kept:,}",
            f"{report.refused:,}",
            f"{report.seconds:,.1f}",
        )
    return table


def _mode(report: ReplayReport) -> str:
    setting = report.setting
    order = "one request at a time" if setting.serial else "side by side"
    return order + (", prompts only" if setting.prompts_only else "")


def _heading(report: ReplayReport) -> Text:
    setting = report.setting
    text = Text()
    text.append(setting.trace, style="bold")
    text.append(f"  on {setting.model}, one rank of TP {setting.tp}, {format_bytes(setting.memory_bytes)}, ")
    text.append(f"blocks of {setting.block_tokens} tokens, policy {policy_text(setting)}, {_mode(report)}\n")
    return text


def _tokens_table(report: ReplayReport) -> Table:
    table = Table(title="Tokens of prompts", title_justify="left")
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("part", justify="right")
    table.add_column("why")
    table.add_row("all", f"{report.input_tokens:,}", "", f"of {report.requests:,} requests")
    table.add_row("hit", f"{report.hit_tokens:,}", _part(report, report.hit_tokens), "supplied", style="bold")
    if report.tiers:
        table.add_row("  memory", f"{report.memory_tokens:,}", _part(report, report.memory_tokens), "")
        for number, tier in enumerate(report.tiers, 1):
            table.add_row(f"  tier {number}", f"{tier.hit_tokens:,}", _part(report, tier.hit_tokens), "loaded")
    for reason, tokens in report.misses.items():
        if tokens:
            table.add_row(reason.replace("_", " "), f"{tokens:,}", _part(report, tokens), _REASONS[reason])
    return table


def _facts_table(report: ReplayReport) -> Table:
    table = Table(title="What it took", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    table.add_column("remark")
    table.add_row("computed again", f"{report.recomputed_tokens:,}", "tokens that had been computed before")
    if report.computed_flops is not None and report.saved_flops is not None:
        table.add_row("FLOPs", f"{report.computed_flops:.3g}", f"{report.saved_flops:.3g} saved")
    if report.tier_loads is not None:
        table.add_row("loads", f"{report.tier_loads.loads:,}", loads_remark(report.tier_loads))
    remark = f"used {report.checkpoints_hit:,} times, {report.checkpoints_evicted:,} evicted"
    table.add_row("checkpoints", f"{report.checkpoints_kept:,}", remark)
    if report.checkpoints_kept:
        for kind, count in report.kept_by_kind.items():
            table.add_row(f"  {kind}", f"{count:,}", f"used {report.hit_by_kind.get(kind, 0):,} times")
        written = format_bytes(round(report.checkpoint_bytes_per_token))
        table.add_row("written for them", written, "for each token computed")
    if report.breakpoints_per_request:
        table.add_row("breakpoints", f"{report.breakpoints_per_request:.1f}", "a request: where a checkpoint is wanted")
    table.add_row("compactions", f"{report.compactions:,}", f"{report.moved_pages:,} pages moved")
    table.add_row("peak", format_bytes(report.peak_bytes), f"of an arena of {format_bytes(report.arena_bytes)}")
    if report.bytes_by_group:
        held = {name: size for name, size in report.bytes_by_group[-1].items() if name != "t"}
        table.add_row("at the end", format_bytes(sum(held.values())), _sizes(held))
    if not report.setting.prompts_only:
        table.add_row(
            "replies", f"{report.output_tokens:,}", f"tokens; {report.continued:,} come back in a later request"
        )
    if report.simulated_s is not None:
        remark = f"{report.followed:,} waited for a prefix under way, {report.preempted:,} were preempted"
        table.add_row("served in", f"{report.simulated_s:,.0f} s", remark)
    if report.refused:
        table.add_row("refused", f"{report.refused:,}", "too large for the arena: give more --memory")
    table.add_row("replayed in", f"{report.seconds:,.1f} s", "of your time")
    return table


def _percentiles_table(report: ReplayReport) -> Table:
    table = Table(title="By request", title_justify="left")
    table.add_column("")
    for name in report.prefill_saved:
        table.add_column(name, justify="right")
    table.add_row("prefill saved", *(f"{value:.1%}" for value in report.prefill_saved.values()))
    loads = None if report.tier_loads is None else report.tier_loads.seconds
    times = (
        ("wait in the queue", report.queue_wait_s),
        ("load from tiers", loads),
        ("time to first token", report.ttft_s),
    )
    for label, waits in times:
        if waits is not None:
            table.add_row(label, *(f"{value:,.3g} s" for value in waits.values()))
    return table


def _part(report: ReplayReport, tokens: int) -> str:
    return f"{tokens / report.input_tokens:.2%}"


def _sizes(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
