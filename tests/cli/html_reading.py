"""Reads pages that commands wrote: tables by their captions, texts by their tags."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """A parsed page. Raises AssertionError if an element is closed that is not the last one opened."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self._caption = ""
        self.feed(content)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in _VOID:
            return
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if not self._open:
            assert not data.strip()
            return
        tag = self._open[-1]
        self.texts[tag][-1] += data
        if tag in ("td", "th"):
            self._rows[-1][-1] += data
        elif tag == "caption":
            self._caption += data

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table":
            self.tables[self._caption] = self._rows

    def column(self, caption: str, header: str) -> list[str]:
        """The cells below one header of a table."""
        head, *rows = self.tables[caption]
        return [row[head.index(header)] for row in rows]
