"""The readers of the training text: each takes a file of a package and gives documents, as lists of raw paragraphs."""

import gzip
import html
import random
import re
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

SEED = 7

Documents = Iterator[list[str]]


class Paragraphs(HTMLParser):
    """Collect the text of <p> elements outside code, tables and page furniture."""

    SKIP = frozenset(
        ["pre", "table", "script", "style", "nav", "header", "footer", "aside", "title", "form", "comment", "info"]
    )
    BLOCK = frozenset(
        ["p", "div", "li", "ul", "ol", "dl", "dt", "dd", "h1", "h2", "h3", "h4", "hr", "blockquote", "section", "item"]
    )

    def __init__(self, skip: frozenset[str] = SKIP) -> None:
        super().__init__()
        self._skip = skip
        self.found: list[str] = []
        self._parts: list[str] | None = None
        self._skipping = 0

    def flush(self, capture: bool = False) -> None:
        """End the open paragraph; start the next one where `capture` is true."""
        if self._parts:
            self.found.append("".join(self._parts))
        self._parts = [] if capture else None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a paragraph, or something to pass over."""
        self._skipping += tag in self._skip
        if tag in self.BLOCK:
            self.flush(capture=tag == "p" or ("class", "para") in attrs)

    def handle_endtag(self, tag: str) -> None:
        """Close a paragraph, or something passed over."""
        self._skipping = max(0, self._skipping - (tag in self._skip))
        if tag in self.BLOCK:
            self.flush()

    def handle_data(self, data: str) -> None:
        """Keep text inside a paragraph."""
        if self._parts is not None and not self._skipping:
            self._parts.append(data)


def read(path: Path) -> str:
    """Give a file's text, unpacked where its name ends in .gz."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def paragraphs(path: Path, parser: Paragraphs) -> list[str]:
    """The paragraphs a parser finds in a file."""
    parser.feed(read(path))
    parser.flush()
    return parser.found


def read_html(path: Path) -> Documents:
    """One document a page."""
    yield paragraphs(path, Paragraphs())


def read_table_html(path: Path) -> Documents:
    """One document a page whose text stands in a table."""
    yield paragraphs(path, Paragraphs(Paragraphs.SKIP - {"table"}))


def read_text(path: Path) -> Documents:
    """Paragraphs between blank lines, without the header and footer of an e-text."""
    text = read(path).replace("\r", "")
    text = re.split(r"\*\*\* ?START OF[^\n]*\n|\*END\*THE SMALL PRINT[^\n]*\n", text)[-1]
    text = re.split(r"\*\*\* ?END OF|End of (?:the )?Project Gutenberg", text)[0]
    yield [p for p in re.split(r"\n\s*\n", text) if "Gutenberg" not in p]


def in_fives(text: str) -> list[str]:
    """Cut a long text into paragraphs of five sentences."""
    parts = re.split(r"(?<=[.!?]['’”\"])\s+|(?<=[.!?])\s+(?=[A-Z‘“\"])", text)
    return [" ".join(parts[i : i + 5]) for i in range(0, len(parts), 5)]


def read_wrapped(path: Path) -> Documents:
    """A book whose wrapped lines have no blank lines between paragraphs."""
    for text in read_text(path):
        yield in_fives(" ".join(text))


def read_dict(path: Path) -> Documents:
    """The entries of a dictionary in dictd's format."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "ignore")
    yield re.split(r"\n\s*\n|\n(?=\S)", text)


def read_lines(path: Path) -> Documents:
    """One paragraph a line."""
    yield read(path).splitlines()


def read_r_strings(path: Path) -> Documents:
    """The string vectors of an R data file: lines of books."""
    data = path.read_bytes()
    while data:
        unzip = zlib.decompressobj()
        block, data, lines, at = unzip.decompress(data[4:]), unzip.unused_data, [], 31
        while block[at : at + 4] in (b"\0\4\0\t", b"\0\0\0\t", b"\0\x04\x80\t", b"\0\0\x80\t"):
            size = int.from_bytes(block[at + 4 : at + 8], "big")
            lines.append(block[at + 8 : at + 8 + size].decode())
            at += 8 + size
        yield re.split(r"\n\s*\n", "\n".join(lines))


def read_sword(path: Path) -> Documents:
    """The paragraphs of a compressed SWORD text (OSIS mark-up), one document a book."""
    index = path.with_suffix(".bzs").read_bytes()
    data = path.read_bytes()
    for at in range(0, len(index), 12):
        start, size = (int.from_bytes(index[at + i : at + i + 4], "little") for i in (0, 4))
        text = zlib.decompress(data[start : start + size]).decode() if size else ""
        text = re.sub(r"<note.*?</note>", " ", text, flags=re.S)
        text = re.sub(r"<title.*?</title>|<milestone[^>]*>", "", text, flags=re.S)
        yield [html.unescape(re.sub(r"<[^>]*>", "", p)) for p in re.split(r'<div eID="[^"]*" type="x-p"/>', text)]


def read_pod(path: Path) -> Documents:
    """The plain paragraphs of a Perl manual."""
    text = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", read(path), flags=re.S)
    for _ in range(3):
        text = re.sub(r"[A-Z]<(?:[^<>|]*\|)?([^<>]*)>", r"\1", text)
    yield [p for p in re.split(r"\n\s*\n", text) if p[:1] not in ("=", " ", "\t")]


def read_conversations(path: Path) -> Documents:
    """Short conversations, the two sides in turn."""
    for talk in re.split(r"^- - ", read(path), flags=re.M)[1:]:
        turns = [re.sub(r"^- ", "", turn.strip()).strip("'\"") for turn in re.split(r"\n  - ", talk)]
        yield [f"{('User', 'Assistant')[i % 2]}: {turn}" for i, turn in enumerate(turns)]


def read_wordnet(path: Path) -> Documents:
    """Definitions with an example, as sentences."""
    forms = {"noun": "{} {} is {}.", "verb": "{} {} means to {}.", "adj": "{} {} means {}.", "adv": "{} {} means {}."}
    kind, found = path.suffix[1:], []
    for line in read(path).splitlines():
        head, _, gloss = line.partition(" | ")
        meaning, *examples = [part.strip() for part in re.split(r'; (?=")', gloss)]
        if line.startswith("  ") or not examples or not meaning or ";" in meaning or "(" in meaning + head:
            continue
        word = head.split()[4].replace("_", " ")
        article = "An" if word[0] in "aeiou" else "A"
        first = {"noun": article if word.islower() else "", "verb": "To"}.get(kind, "The word")
        example = examples[0].strip('"').rstrip(".")
        tail = f" For example: {example}{'' if example[-1:] in '!?' else '.'}"
        found.append(forms[kind].format(first, word, meaning).strip() + tail)
    random.Random(SEED).shuffle(found)
    yield from (found[i : i + 12] for i in range(0, len(found), 12))


READERS: dict[str, Callable[[Path], Documents]] = {
    "html": read_html,
    "table_html": read_table_html,
    "text": read_text,
    "lines": read_lines,
    "r": read_r_strings,
    "sword": read_sword,
    "pod": read_pod,
    "wrapped": read_wrapped,
    "dict": read_dict,
    "talk": read_conversations,
    "wordnet": read_wordnet,
}
