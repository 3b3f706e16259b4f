"""The pictures of docs/concepts.md, drawn from a real plan and a real cache: no number in them is typed in.

python docs/img/draw.py        writes arena.svg, page.svg and siblings.svg beside this file
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hybridkv.cache import Cache, CacheLayout, NoRoom
from hybridkv.models import load_model
from hybridkv.plan import GroupPlan, Plan, PlanOptions, make_plan
from hybridkv.units import format_bytes

MODEL, MEMORY_BYTES = "qwen3-next-80b-a3b", 80 * 2**30
SHARED_TOKENS, OWN_TOKENS, NUM_SIBLINGS = 560, 400, 4
COLOURS = {"null": "#d9d9d9", "free": "#ffffff", "full": "#9ecae1", "state": "#fdae6b"}
INK, PALE = "#222222", "#777777"


class Sibling(NamedTuple):
    """What the cache did for one request."""

    resumed_at: int
    checkpoints: list[int]
    slabs: dict[str, set[int]]


class Canvas:
    """An SVG in the making. Coordinates are pixels."""

    def __init__(self, width: int, height: int) -> None:
        self._head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
        self._parts = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>']

    def box(self, x: float, y: float, width: float, height: float, fill: str, *labels: str) -> None:
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {size} fill="{fill}" stroke="{INK}" stroke-width="0.8"/>')
        for number, label in enumerate(labels):
            self.text(x + width / 2, y + height / 2 + 12 + 16 * (number - len(labels) / 2), label, anchor="middle")

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", fill: str = INK, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{weight}'
        self._parts.append(f'<text {place} font-family="DejaVu Sans, sans-serif" font-size="12">{text}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False, width: float = 1) -> None:
        style = f'stroke="{PALE if dashed else INK}" stroke-width="{width:g}"' + (' stroke-dasharray="4 3"' * dashed)
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" {style}/>')

    def dot(self, x: float, y: float, fill: str) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{fill}" stroke="{INK}"/>')

    def arrow_up(self, x: float, y: float) -> None:
        self._parts.append(f'<path d="M{x:g} {y:g} l-5 10 h10 z" fill="{INK}"/>')

    def __str__(self) -> str:
        return "\n".join([self._head, *self._parts, "</svg>", ""])


def draw_all() -> dict[str, str]:
    """Pictures by file name."""
    plan = make_plan(load_model(MODEL), PlanOptions(memory_bytes=MEMORY_BYTES))
    siblings = run_siblings(plan)
    return {
        "arena.svg": str(draw_arena(plan, siblings)),
        "page.svg": str(draw_pages(plan)),
        "siblings.svg": str(draw_siblings(siblings)),
    }


def run_siblings(plan: Plan) -> list[Sibling]:
    """Requests that begin alike, one after another: prompts only."""
    layout = CacheLayout.from_plan(plan)
    cache = Cache(layout, run_operations=lambda operations: None)
    slab_pages = {group.name: group.pages_per_slab for group in (*layout.token_groups, *layout.state_groups)}
    found = []
    for number in range(NUM_SIBLINGS):
        lease = cache.begin([*range(SHARED_TOKENS), *[1000 + number] * OWN_TOKENS])
        step = cache.extend(lease, lease.num_tokens - lease.computed)
        assert not isinstance(step, NoRoom)
        segments = step.segments["state"]
        pages = {"full": step.tables["full"], "state": [page for segment in segments for page in segment.dst]}
        slabs = {name: {page // slab_pages[name] for page in some} for name, some in pages.items()}
        found.append(Sibling(lease.cached_tokens, [segment.end for segment in segments], slabs))
        cache.commit(lease)
        cache.release(lease)
    return found


def draw_arena(plan: Plan, siblings: list[Sibling]) -> Canvas:
    """Slabs and who owns them, and what two of them are cut into."""
    canvas = Canvas(840, 240)
    owners = {slab: name for one in siblings for name, slabs in one.slabs.items() for slab in slabs}
    owners[0] = "null"
    title = f"{plan.model.name}, {format_bytes(plan.options.memory_bytes)}"
    canvas.text(20, 24, f"One arena: {plan.num_slabs:,} slabs of {format_bytes(plan.slab_bytes)} ({title})", bold=True)
    width = 44
    shown = max(owners) + 2
    for slab in range(shown):
        owner = owners.get(slab, "free")
        canvas.box(20 + slab * width, 40, width, 50, COLOURS[owner], f"{slab}", owner)
    canvas.text(26 + shown * width, 70, "...")
    magnified = {min(slab for slab, owner in owners.items() if owner == name): name for name in ("full", "state")}
    for number, slab in enumerate(sorted(magnified)):
        left, right = 20 + number * 410, 410 + number * 410
        canvas.line(20 + slab * width, 90, left, 140, dashed=True)
        canvas.line(20 + (slab + 1) * width, 90, right, 140, dashed=True)
        _draw_slab(canvas, plan.group(magnified[slab]), slab, left, right - left)
    canvas.text(20, 225, "Page i of a group lies at i times its stride, whatever slab it is in.", fill=PALE)
    return canvas


def _draw_slab(canvas: Canvas, group: GroupPlan, slab: int, x: float, width: float) -> None:
    shown = min(group.pages_per_slab, 40)
    for page in range(shown):
        label = f"page {slab * group.pages_per_slab + page}" if shown < 10 else ""
        canvas.box(x + page * width / shown, 140, width / shown, 34, COLOURS[group.name], label)
    drawn = f", {shown} drawn" if shown < group.pages_per_slab else ""
    count = f"{group.pages_per_slab} pages of {format_bytes(group.page_bytes)}{drawn}"
    canvas.text(x, 192, f"slab {slab}, of the group {group.name}: {count}")


def draw_pages(plan: Plan) -> Canvas:
    """A page of each group cut into rows, and one row of the attention page in full."""
    canvas = Canvas(840, 330)
    for number, name in enumerate(("state", "full")):
        group, y = plan.group(name), 40 + number * 85
        what = f"one block of {plan.options.block_tokens} tokens" if name == "full" else "one state"
        canvas.text(20, y - 8, f"A page of {name}: {what}, {format_bytes(group.page_bytes)}", bold=True)
        _draw_rows(canvas, group, y)
    group = plan.group("full")
    row, row_width = group.rows[0], 800 / len(group.rows)
    for x, corner in ((20, 20), (20 + row_width, 820)):
        canvas.line(x, 171, corner, 205, dashed=True)
    _draw_row(canvas, plan, 205)
    what = f"{format_bytes(row.nbytes)}, order {plan.options.row_order}"
    canvas.text(20, 312, f"Row 0 in full ({what}): heads, then layers, then K and V, then tokens.", fill=PALE)
    return canvas


def _draw_rows(canvas: Canvas, group: GroupPlan, y: float) -> None:
    width = 800 / len(group.rows)
    for number, row in enumerate(group.rows):
        layers = ", ".join(map(str, row.layers))
        canvas.box(20 + number * width, y, width, 46, COLOURS[group.name], f"row {number}", layers)


def _draw_row(canvas: Canvas, plan: Plan, y: float) -> None:
    row = plan.group("full").rows[0]
    heads = row.views[0].shape[1]
    cell = 800 / (heads * len(row.views))
    for head in range(heads):
        for number, view in enumerate(row.views):
            x = 20 + (head * len(row.views) + number) * cell
            canvas.box(x, y, cell, 40, COLOURS["full"], view.part.upper())
            if view.part == row.views[0].part:
                canvas.text(x + cell, y + 55, f"layer {view.layer}", anchor="middle", fill=PALE)
        canvas.text(20 + (head + 0.5) * len(row.views) * cell, y + 73, f"head {head}", anchor="middle")


def draw_siblings(siblings: list[Sibling]) -> Canvas:
    """The radix tree that the siblings leave: tokens to the right, checkpoints as dots, resumes as arrows."""
    canvas = Canvas(840, 90 + 70 * len(siblings))
    title = f"{len(siblings)} prompts, one after another: {SHARED_TOKENS} tokens in common, {OWN_TOKENS} of their own"
    canvas.text(20, 24, title, bold=True)

    def at(position: int) -> float:
        return 30 + position * 600 / (SHARED_TOKENS + OWN_TOKENS)

    trunk, bend = 80.0, at(SHARED_TOKENS) + 14
    canvas.line(at(0), trunk, bend, trunk, width=4)
    canvas.line(bend, trunk, bend, trunk + (len(siblings) - 1) * 70, width=2)
    labelled = {position for one in siblings[:2] for position in one.checkpoints if position <= one.checkpoints[-2]}
    for position in sorted(labelled | {0}):
        canvas.text(at(position), trunk - 12, str(position), anchor="middle", fill=PALE)
    for number, one in enumerate(siblings):
        y = trunk + number * 70
        canvas.line(bend, y, at(SHARED_TOKENS + OWN_TOKENS), y, width=4)
        canvas.text(at(SHARED_TOKENS + OWN_TOKENS) + 12, y + 4, f"prompt {number + 1}: resumes at {one.resumed_at}")
        for position in one.checkpoints:
            canvas.dot(at(position), trunk if position <= SHARED_TOKENS else y, COLOURS["state"])
    for position in sorted({one.resumed_at for one in siblings}):
        who = [str(number + 1) for number, one in enumerate(siblings) if one.resumed_at == position]
        drop = 60 if position == SHARED_TOKENS else 10
        canvas.arrow_up(at(position), trunk + 8)
        canvas.line(at(position), trunk + 18, at(position), trunk + 18 + drop)
        canvas.text(
            at(position) - 4,
            trunk + 32 + drop,
            f"prompt{'s' * (len(who) > 1)} {', '.join(who)}",
            anchor="end" if position else "start",
        )
    canvas.dot(36, 60 + 70 * len(siblings), COLOURS["state"])
    canvas.text(48, 64 + 70 * len(siblings), "a checkpoint: the state after so many tokens", fill=PALE)
    return canvas


if __name__ == "__main__":
    for name, picture in draw_all().items():
        Path(__file__).with_name(name).write_text(picture, encoding="utf-8")
