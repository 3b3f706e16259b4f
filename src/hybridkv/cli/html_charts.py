"""Charts as inline SVG, without script: lines on logarithmic axes, and bars. Colors are classes of the page's style."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10

from hybridkv.cli.html_parts import element, text

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 246, 16, 52
_MOST_TICKS = 12
_BAR_HEIGHT, _BAR_LEFT = 30, 190
Point = tuple[float, float]
Shape = Callable[[float, float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """A curve through `points`, with marks at `marks`. Points that are not above zero are left out."""

    name: str
    points: Sequence[Point]
    marks: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Words:
    """What a chart says: its id in the page, its title and description for screen readers, and its axes."""

    id: str
    title: str
    description: str
    x: str
    y: str


def line_chart(words: Words, lines: Sequence[Line], x_ticks: Sequence[int]) -> str:
    """Lines over x, both axes logarithmic; the legend names them from the top."""
    xs = [x for line in lines for x, _ in line.points] + [float(x) for x in x_ticks]
    ys = [y for line in lines for _, y in line.points if y > 0] or [1.0]
    y_ticks = _decade_ticks(min(ys), max(ys))
    x_of = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_of = _scale(y_ticks[0], max(y_ticks[-1], max(ys)), _HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(words, x_ticks, y_ticks, x_of, y_of)]
    ordered = sorted(enumerate(lines), key=lambda item: -max((y for _, y in item[1].points[-1:]), default=0))
    for place, (index, line) in enumerate(ordered):
        parts += [_curve(line, index, x_of, y_of), _legend(line.name, index, place)]
    return _svg(words, _HEIGHT, parts)


def bar_chart(words: Words, bars: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars from zero: name, value, and the value as text. The first is ours."""
    most = max(value for _, value, _ in bars) or 1.0
    room = _WIDTH - _BAR_LEFT - 90
    parts = []
    for index, (name, value, shown) in enumerate(bars):
        y = _TOP + index * _BAR_HEIGHT
        width = max(2.0, room * value / most)
        parts.append(text("text", name, x=_BAR_LEFT - 10, y=y + 17, class_="end"))
        parts.append(
            element("rect", "", x=_BAR_LEFT, y=y + 3, width=width, height=_BAR_HEIGHT - 10, class_=f"f{min(index, 1)}")
        )
        parts.append(text("text", shown, x=_BAR_LEFT + width + 8, y=y + 17, class_="value"))
    bottom = _TOP + len(bars) * _BAR_HEIGHT
    parts.append(element("path", "", class_="axis", d=f"M{_BAR_LEFT} {_TOP}V{bottom}"))
    parts.append(text("text", words.x, x=_BAR_LEFT + room / 2, y=bottom + 24, class_="mid label"))
    return _svg(words, bottom + 36, parts)


def short_count(number: float) -> str:
    """1K is 1,024: lengths of requests are powers of two."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if number >= size and number % size == 0:
            return f"{number / size:,.0f}{unit}"
    return f"{number:,.0f}"


def _svg(words: Words, height: int, parts: Sequence[str]) -> str:
    head = text("title", words.title, id=f"{words.id}-title") + text("desc", words.description, id=f"{words.id}-desc")
    named = f"{words.id}-title {words.id}-desc"
    drawing = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{named}">{head}\n'
    return element("div", drawing + "\n".join(parts) + "</svg>", class_="scroll")


def _frame(
    words: Words,
    x_ticks: Sequence[int],
    y_ticks: Sequence[float],
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for y in y_ticks:
        parts.append(element("path", "", class_="grid", d=f"M{_LEFT} {y_of(y):.1f}H{right}"))
        parts.append(text("text", f"{y:,.0f}", x=_LEFT - 8, y=y_of(y) + 4, class_="end"))
    for x in x_ticks[:: ceil(len(x_ticks) / _MOST_TICKS)]:
        parts.append(element("path", "", class_="grid", d=f"M{x_of(x):.1f} {_TOP}V{bottom}"))
        parts.append(text("text", short_count(x), x=x_of(x), y=bottom + 18, class_="mid"))
    parts.append(element("path", "", class_="axis", d=f"M{_LEFT} {_TOP}V{bottom}H{right}"))
    parts.append(text("text", words.x, x=(_LEFT + right) / 2, y=bottom + 42, class_="mid label"))
    middle = (_TOP + bottom) / 2
    parts.append(text("text", words.y, x=16, y=middle, transform=f"rotate(-90 16 {middle:.1f})", class_="mid label"))
    return "\n".join(parts)


def _curve(line: Line, index: int, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    seen = [(x, y) for x, y in line.points if y > 0]
    path = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in seen)
    parts = [element("path", "", class_=f"line s{index}", d=f"M{path}")] if len(seen) > 1 else []
    for x, y in line.marks:
        if y > 0:
            tip = text("title", f"{line.name}: {y:,.0f} at {x:,.0f}")
            parts.append(element("path", tip, class_=f"f{index}", d=_SHAPES[index % len(_SHAPES)](x_of(x), y_of(y))))
    return element("g", "\n".join(parts))


def _legend(name: str, index: int, place: int) -> str:
    x, y = _WIDTH - _RIGHT + 18, _TOP + 14 + place * 24
    sample = element("path", "", class_=f"line s{index}", d=f"M{x} {y}H{x + 26}")
    mark = element("path", "", class_=f"f{index}", d=_SHAPES[index % len(_SHAPES)](x + 13, y))
    return sample + mark + text("text", name, x=x + 34, y=y + 4)


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """Places of values from `low` to `high` on a logarithmic axis."""
    span = log2(high / low) or 1.0
    return lambda value: start + (stop - start) * log2(value / low) / span


def _decade_ticks(low: float, high: float) -> list[float]:
    """1, 10, 100 ... around the values, with 2 and 5 between them where they span little."""
    first, last = floor(log10(low)), ceil(log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    start = max((tick for tick in ticks if tick <= low), default=ticks[0])
    stop = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return [tick for tick in ticks if start <= tick <= stop]


def _circle(x: float, y: float) -> str:
    return f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z"


def _square(x: float, y: float) -> str:
    return f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7Z"


def _triangle(x: float, y: float) -> str:
    return f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9Z"


def _diamond(x: float, y: float) -> str:
    return f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5Z"


_SHAPES: tuple[Shape, ...] = (_circle, _square, _triangle, _diamond)
