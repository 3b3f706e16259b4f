"""Records of requests as text and tables that people like to read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridkv.cli.server_client import printable
from hybridkv.units import format_bytes

Record = Mapping[str, Any]
_SOURCES = {"memory": "green", "store": "cyan", "engine": "magenta", "computed": "yellow"}
_NAMES = {"memory": "memory", "store": "the store", "engine": "another engine", "computed": "computed"}
_MARKS = {"memory": "█", "store": "▓", "engine": "▒", "computed": "░"}
_MOST_BAR = 100
_MOST_EVENTS = 24
_ALL_CACHED = "All of the prompt that can be cached was cached."


def requests_table(requests: Sequence[Record]) -> Table:
    """One line a request."""
    table = Table(title="Latest requests, the newest first", title_justify="left")
    for header in ("id", "at", "outcome"):
        table.add_column(header, no_wrap=True)
    for header in ("prompt", "cached", "reply", "TTFT"):
        table.add_column(header, justify="right")
    table.add_column("why not more")
    table.caption = "hybridkv why ID explains one"
    table.caption_justify = "left"
    for one in requests:
        ttft = one["ttft_s"]
        table.add_row(
            Text(printable(one["id"])),
            time.strftime("%H:%M:%S", time.localtime(one["created"])),
            Text(printable(one["outcome"])),
            f"{one['prompt_tokens']:,}",
            f"{one['cached_tokens']:,}",
            f"{one['reply_tokens']:,}",
            "-" if ttft is None else _seconds(ttft),
            Text(printable(one["missing"]).replace("_", " ") if one["why"] and one["missing"] else "-"),
        )
    return table


def record_view(record: Record, width: int) -> Group:
    """One request, prompt by prompt."""
    prompts = record["prompts"]
    parts: list[RenderableType] = [_heading(record)]
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            parts.append(Text(f"\nPrompt {number + 1} of {len(prompts)}", style="bold"))
        parts += [Text("\nIt has not ended.")] if prompt is None else _prompt(prompt, width)
    return Group(*parts)


def _heading(record: Record) -> Text:
    text = Text()
    text.append(printable(record["id"]), style="bold")
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["created"]))
    text.append(f"  {printable(record['path'])}, {at}, {printable(record['outcome'])}")
    if record["request_id"] != record["id"]:
        text.append(f"\nX-Request-Id: {printable(record['request_id'])}", style="dim")
    return text


def _prompt(prompt: Record, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(""), _sentences(prompt), Text("")]
    parts += [_bar(prompt, min(width, _MOST_BAR)), _sources(prompt), Text("")]
    if prompt["lookup"] is not None:
        parts += [_groups(prompt["lookup"]), _lookup(prompt["lookup"], _breakpoints(prompt)), Text("")]
    if prompt["store"] is not None:
        parts += [_store(prompt["store"]), Text("")]
    return [*parts, _times(prompt), _events(prompt["events"])]


def _sentences(prompt: Record) -> Text:
    count, cached = prompt["prompt_tokens"], prompt["cached_tokens"]
    text = Text(f"{cached:,} of {count:,} prompt tokens were cached.", style="bold")
    if prompt.get("adapter") is not None:  # servers of older versions do not tell it
        text.append(f"\nAdapter: {printable(prompt['adapter'])}", style="not bold")
    if not prompt["why"] and cached:
        text.append(f"\n{_ALL_CACHED}", style="not bold")
    for reason in prompt["why"]:
        text.append(f"\n{printable(reason['text'])}", style="not bold")
    for warning in prompt.get("warnings", ()):  # servers of older versions have none
        text.append(f"\n{printable(warning)}", style="not bold yellow")
    return text


def _bar(prompt: Record, width: int) -> Text:
    """The prompt from left to right, in the colours of its sources. Each span has at least one mark."""
    text, total = Text(no_wrap=True), max(1, prompt["prompt_tokens"])
    for span in prompt["spans"]:
        start, end = (round(span[side] * width / total) for side in ("start", "end"))
        text.append(_MARKS[span["source"]] * max(1, end - start), style=_SOURCES[span["source"]])
    text.truncate(width)
    return text


def _sources(prompt: Record) -> Text:
    counts = dict.fromkeys(_SOURCES, 0)
    for span in prompt["spans"]:
        counts[span["source"]] += span["end"] - span["start"]
    text, total = Text(), max(1, prompt["prompt_tokens"])
    for source, count in counts.items():
        if count:
            text.append(_MARKS[source], style=_SOURCES[source])
            text.append(f" {_NAMES[source]} {count:,} ({count / total:.0%})   ")
    return text


def _groups(lookup: Record) -> Table:
    table = Table(title="What each group of layers had in memory", title_justify="left")
    table.add_column("group")
    table.add_column("kind")
    table.add_column("supplies to", justify="right")
    table.add_column("has", overflow="fold", ratio=1)
    for group in lookup["groups"]:
        name, kind = (Text(printable(group[field])) for field in ("name", "kind"))
        table.add_row(name, kind, f"{group['supplies']:,}", _has(group))
    return table


def _has(group: Record) -> str:
    if group["num_positions"]:
        hidden = group["num_positions"] - len(group["positions"])
        listed = ", ".join(f"{position:,}" for position in group["positions"])
        return "states at " + (f"{hidden:,} more, " if hidden > 0 else "") + listed
    return (
        "tokens " + ", ".join(f"{start:,} to {end:,}" for start, end in group["runs"]) if group["runs"] else "nothing"
    )


def _breakpoints(prompt: Record) -> list[str]:
    """What became of each breakpoint; their positions alone if the server is of an older version."""
    if "kept" not in prompt:
        return [f"{position:,}" for position in prompt["breakpoints"]]
    told = []
    for one in prompt["kept"]:
        cost = f", {format_bytes(one['bytes'])}" if one["bytes"] else ""
        told.append(f"{one['position']:,} ({printable(one['outcome']).replace('_', ' ')}{cost})")
    return told


def _lookup(lookup: Record, breakpoints: Sequence[str]) -> Text:
    return Text("\n".join(_lookup_lines(lookup, breakpoints)))


def _lookup_lines(lookup: Record, breakpoints: Sequence[str]) -> Iterator[str]:
    matched = max(lookup["matched_tokens"], lookup["position"])
    yield (
        f"In memory it could resume at token {lookup['position']:,}. Keys and values match to {matched:,}. The last "
        f"token is always computed: at most {lookup['limit']:,} tokens can be cached."
    )
    used = lookup["checkpoint"]
    if used is not None:
        yield (
            f"Checkpoint: at token {used['position']:,}, of kind {printable(used['kind'])}, used {used['hits']:,} "
            f"times before, idle for {_seconds(used['idle_s'])}."
        )
    for one in lookup["evicted"]:
        ago = f"{_seconds(one['seconds_ago'])} and {one['requests_ago']:,} requests before"
        yield f"Evicted: what a request could resume from at token {one['position']:,}, {ago}."
    if lookup["likely"]:
        yield "Prompts that begin like this one often part " + ", ".join(map(_place, lookup["likely"])) + "."
    if breakpoints:
        yield "Breakpoints: " + ", ".join(breakpoints)


def _place(place: Record) -> str:
    offset, chance = place["offset"], f"({place['chance']:.0%} of them)"
    return f"at token {offset:,} {chance}" if offset > 0 else f"{-offset:,} tokens before the end {chance}"


def _store(store: Record) -> Text:
    text = f"Store: {printable(store['outcome'])}"
    if store["found"]:
        text += f"; it has the prompt to token {store['found']:,}"
    if store["loaded"]:
        mode = f" ({printable(store['mode'])})" if store["mode"] else ""
        text += f"; loaded to {store['loaded']:,}: {format_bytes(store['bytes'])} in {_seconds(store['seconds'])}{mode}"
    if store["failure"]:
        text += f"; failure: {printable(store['failure'])}"
    return Text(text)


def _times(prompt: Record) -> Text:
    times = prompt["metrics"]
    text = (
        f"Reply tokens: {prompt['reply_tokens']:,}, ended by {printable(prompt['finish_reason'])}. Queue "
        f"{_seconds(times['queue_s'])}, first token {_seconds(times['ttft_s'])}, all {_seconds(times['total_s'])}"
    )
    if times["per_token_s"]:
        text += f", {_seconds(times['per_token_s'])} a token"
    return Text(text + (f", preempted {times['preemptions']} times" if times["preemptions"] else ""))


def _events(events: Sequence[Record]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column()
    table.add_column()
    half = _MOST_EVENTS // 2
    shown = [*events[:half], None, *events[-half:]] if len(events) > _MOST_EVENTS else events
    for event in shown:
        if event is None:
            table.add_row("", f".. {len(events) - 2 * half} more", "")
        else:
            took = "" if event["seconds"] is None else f"took {_seconds(event['seconds'])}"
            table.add_row(_seconds(event["at"]), Text(f"{printable(event['what'])}{_range(event)}"), took)
    return table


def _range(event: Record) -> str:
    start, end = event["start"], event["end"]
    if start is not None and end is not None:
        return f" {start:,} to {end:,}"
    if end is not None:
        return f" at {end:,}"
    return "" if start is None else f" from {start:,}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
