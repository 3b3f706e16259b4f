"""Pieces of HTML pages: escaped text, and the tables of the terminal as HTML tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def element(tag: str, content: str, **attributes: str | float) -> str:
    """An element around `content`, which is HTML already. Attributes are escaped; `_` in their names is a hyphen."""
    return f"<{tag}{_attributes(attributes)}>{content}</{tag}>"


def text(tag: str, content: str, **attributes: str | float) -> str:
    """An element around `content`, which is escaped."""
    return element(tag, escape(content), **attributes)


def simple_table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]], *, ours: str = "") -> str:
    """A table whose first column names the rows; all others are numbers. The row called `ours` stands out."""
    table = Table(*headers, title=caption)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(Text, row), style="bold" if row[0] == ours else None)
    return html_table(table)


def html_table(table: Table) -> str:
    """A table of the terminal, cell by cell, in a box that scrolls where the page is narrow."""
    title, note = _plain(table.title), _plain(table.caption)
    numeric = [column.justify == "right" for column in table.columns]
    parts = [text("caption", title)]
    if table.show_header:
        heads = (_head_cell(_plain(column.header), right) for column, right in zip(table.columns, numeric, strict=True))
        parts.append(element("thead", element("tr", "".join(heads))))
    body = []
    cells = zip(*(list(column.cells) for column in table.columns), strict=True)
    for row, values in zip(table.rows, cells, strict=True):
        first, *rest = map(_plain, values)
        line = text("th", first, scope="row")
        line += "".join(_cell(value, right) for value, right in zip(rest, numeric[1:], strict=True))
        body.append(element("tr", line, class_="ours") if row.style else element("tr", line))
    parts.append(element("tbody", "\n".join(body)))
    box = element(
        "div", element("table", "\n".join(parts)), class_="scroll", tabindex=0, role="region", aria_label=title
    )
    return box + (text("p", note, class_="note") if note else "")


def _head_cell(content: str, is_number: bool) -> str:
    if not content:
        return "<td></td>"
    return text("th", content, scope="col", class_="n") if is_number else text("th", content, scope="col")


def _cell(content: str, is_number: bool) -> str:
    return text("td", content, class_="n") if is_number else text("td", content)


def _plain(cell: RenderableType | None) -> str:
    """The words of a cell, as the terminal shows them."""
    if cell is None:
        return ""
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _attributes(attributes: dict[str, str | float]) -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"' for name, value in attributes.items()
    )


def _number(value: str | float) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
