"""Figures of replays. matplotlib is loaded when a figure is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridkv.errors import DiskError, InputError, is_disk_failure
from hybridkv.replay import ReplayReport
from hybridkv.units import format_bytes

_GIB = 2**30
_SUFFIXES = (".png", ".svg")
_HEADROOM = 1.15
_HIGHEST = 104
"""Percent: a line at 100 is to be seen."""


def check_plot(path: Path) -> None:
    """Find out before the long work whether a figure can be saved."""
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"plot {path}: name it .png or .svg")
    if find_spec("matplotlib") is None:
        raise InputError("a plot needs matplotlib: pip install 'hybridkv[plot]'")
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        kind = DiskError if is_disk_failure(error) else InputError
        raise kind(f"cannot write plot {path}: {error.strerror}") from None
    if not existed:
        path.unlink()


def save_plot(path: Path, reports: Sequence[ReplayReport]) -> None:
    make_figure(reports).savefig(path, dpi=150)


def make_figure(reports: Sequence[ReplayReport]) -> Any:
    """Hit ratio over memory, a line for each other setting; for one replay, bytes by group over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if len(reports) == 1:
        _draw_bytes(axes, reports[0])
    else:
        _draw_sweep(axes, reports)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _draw_bytes(axes: Any, report: ReplayReport) -> None:
    samples = report.bytes_by_group
    names = [name for name in samples[0] if name != "t"]
    times = [sample["t"] for sample in samples]
    axes.stackplot(times, [[sample[name] / _GIB for sample in samples] for name in names], labels=names)
    unit = "requests" if report.setting.serial else "seconds"
    axes.set(xlabel=unit, ylabel="GiB", title=f"{report.setting.trace} on {report.setting.model}")


def _draw_sweep(axes: Any, reports: Sequence[ReplayReport]) -> None:
    labels = [_label(report, reports) for report in reports]
    size_of, xlabel = _size_axis(reports)
    for label in dict.fromkeys(labels):
        line = [report for report, own in zip(reports, labels, strict=True) if own == label]
        line.sort(key=size_of)
        axes.plot(
            [size_of(report) / _GIB for report in line],
            [100 * report.hit_ratio for report in line],
            marker="o",
            label=label,
        )
    bound = 100 * max(report.seen_ratio for report in reports)
    axes.axhline(
        bound, color="dimgray", zorder=1, linestyle="--", label=f"seen before: no cache supplies more than {bound:.1f}%"
    )
    setting = reports[0].setting
    axes.set(xlabel=xlabel, ylabel="hit ratio, %", title=f"{setting.trace} on {setting.model}")
    axes.set_ylim(0, max(1, min(_HIGHEST, _HEADROOM * bound)))
    sizes = sorted({size_of(report) / _GIB for report in reports})
    if sizes[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter("{x:.3g}")
    axes.minorticks_off()


def _size_axis(reports: Sequence[ReplayReport]) -> tuple[Callable[[ReplayReport], int], str]:
    """Memory; or the size of the last tier where only that changes."""
    if len({report.setting.memory_bytes for report in reports}) == 1 and _tier_sizes_differ(reports):
        return _tier_bytes, "GiB of the last tier"
    return lambda report: report.setting.memory_bytes, "GiB a rank"


def _tier_bytes(report: ReplayReport) -> int:
    return report.tiers[-1].size_bytes


def _tier_sizes_differ(reports: Sequence[ReplayReport]) -> bool:
    return bool(reports[0].tiers) and len({_tier_bytes(report) for report in reports}) > 1


def _label(report: ReplayReport, reports: Sequence[ReplayReport]) -> str:
    """The settings, but for that of the axis, in which the replays differ."""
    settings = [other.setting for other in reports]
    own, parts = report.setting, []
    size_of, _ = _size_axis(reports)
    if len({setting.policy for setting in settings}) > 1 or len({size_of(r) for r in reports}) == len(reports):
        parts.append(own.policy)
    if _tier_sizes_differ(reports) and len({setting.memory_bytes for setting in settings}) > 1:
        parts.append(f"tier of {format_bytes(_tier_bytes(report))}")
    if len({setting.tp for setting in settings}) > 1:
        parts.append(f"TP {own.tp}")
    if len({setting.state_dtype for setting in settings}) > 1:
        parts.append(own.state_dtype or "default states")
    if len({setting.block_tokens for setting in settings}) > 1:
        parts.append(f"blocks of {own.block_tokens}")
    if len({setting.breakpoints for setting in settings}) > 1:
        parts.append("breakpoints" if own.breakpoints else "no breakpoints")
    return ", ".join(parts)
