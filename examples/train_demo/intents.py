"""Intents of chat.py, read from intents.toml and tables.toml: what users ask, and what the model answers.

An intent has wordings and answers, both templates with slots, and rows of values for the slots.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wordings import Row, Wordings, expanded, filled, sentence


@dataclass(frozen=True)
class Intent:
    """Something that users ask, and what the model answers. A plain intent has one row without values."""

    name: str
    ask: Wordings
    say: tuple[str, ...]
    must: tuple[str, ...]
    rows: tuple[Row, ...]
    without_article: frozenset[str] = frozenset()

    def answers(self, row: Row) -> list[str]:
        return [sentence(filled(text, row, self.without_article)) for text in self.say]

    def question(self, template: str, row: Row) -> str:
        return filled(template, row, self.without_article)

    def pattern(self, row: Row) -> re.Pattern[str]:
        """What a right answer matches."""
        if not self.must:
            return re.compile("|".join(re.escape(answer) for answer in self.answers(row)))
        escaped = {slot: rf"\b{re.escape(value)}\b" for slot, value in row.items()}
        return re.compile(
            "".join(f"(?=.*(?:{filled(part, escaped)}))" for part in self.must), re.IGNORECASE | re.DOTALL
        )


def read(name: str) -> dict[str, Any]:
    with (Path(__file__).parent / name).open("rb") as file:
        return tomllib.load(file)


def load_intents() -> dict[str, list[Intent]]:
    """The intents of each area of intents.toml."""
    areas = read("intents.toml")
    macros = areas.pop("macros")
    found: dict[str, list[Intent]] = {}
    for area, intents in areas.items():
        for name, entry in intents.items():
            templates = [text for template in entry.get("ask", []) for text in expanded(template)]
            for macro, wordings in macros.items():
                templates += [text.replace("{t}", phrase) for phrase in entry.get(macro, []) for text in wordings]
            wordings = Wordings.divide(name, templates)
            intent = Intent(f"{area}.{name}", wordings, tuple(entry["say"]), tuple(entry.get("must", ())), ({},))
            found.setdefault(area, []).append(intent)
    return found


def load_tables() -> list[Intent]:
    """The intents of tables.toml."""
    tables = read("tables.toml")
    words = tables.pop("words")
    groups: dict[str, str] = tables["category"]["groups"]
    bare = set(words["no_article"].split())
    bare |= {word for group in bare & set(groups) for word in groups[group].split()}
    category = [{"x": word, "y": group} for group, members in groups.items() for word in members.split()]
    known: dict[str, list[Row]] = {"category": list(category)}
    found = []
    for name, entry in tables.items():
        if name not in known:
            known[name] = known[entry["rows_of"]] if "rows_of" in entry else list(_rows(entry))
        rows = known[name]
        if entry.get("other"):
            rows = list(_with_wrong_values(rows, words["overlap"]))
        without_article = frozenset(bare - set(groups)) if name in ("category", "is", "is_not") else frozenset(bare)
        must = tuple(entry.get("must", ["{y}"]))
        found.append(
            Intent(name, Wordings.divide(name, entry["ask"]), tuple(entry["say"]), must, tuple(rows), without_article)
        )
    return found


_NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]


def _rows(entry: Mapping[str, Any]) -> Iterator[Row]:
    for chain in entry.get("chains", []):
        for first, second in itertools.pairwise(chain.split()):
            yield {"x": first, "y": second}
    if "numbers" in entry:
        for x, z in itertools.product(range(11), repeat=2):
            if entry["numbers"] == "words":
                yield {"x": _NUMBER_WORDS[x], "z": _NUMBER_WORDS[z], "y": _NUMBER_WORDS[x + z]}
            elif entry["numbers"] != "-" or x >= z:
                result = {"+": x + z, "-": x - z, "*": x * z}[entry["numbers"]]
                yield {"x": str(x), "z": str(z), "y": str(result)}
    for row in _listed(entry.get("rows", ""), entry.get("columns", ["x", "y"])):
        yield row
        if entry.get("both_ways"):
            yield {"x": row["y"], "y": row["x"]}
    yield from _listed(entry.get("one_way", ""), ["x", "y"])


def _listed(rows: str, columns: Sequence[str]) -> Iterator[Row]:
    for row in rows.split(";") if rows else ():
        yield dict(zip(columns, (value.strip() for value in row.split("=")), strict=True))


def _with_wrong_values(rows: Sequence[Row], overlap: Sequence[str]) -> Iterator[Row]:
    values = sorted({row["y"] for row in rows})
    for row in rows:
        wrong = [value for value in values if value != row["y"] and f"{row['y']} {value}" not in overlap]
        for value in random.Random(row["x"]).sample(wrong, 5):
            yield {**row, "z": value}
