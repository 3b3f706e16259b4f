"""Wordings of chat.py: reads the TOML files beside it, expands templates, and writes them as different people would.

An intent has wordings and answers, both templates with slots, and rows of values for the slots. About a tenth of the
wordings of each intent is held out: training never sees them, and evaluation asks nothing else.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT_SHARE = 0.1

Row = Mapping[str, str]

_CONTRACTIONS = {
    "what is": "what's", "who is": "who's", "where is": "where's", "how is": "how's", "that is": "that's",
    "it is": "it's", "I am": "I'm", "you are": "you're", "do not": "don't", "does not": "doesn't", "cannot": "can't",
    "I would": "I'd", "let us": "let's", "did not": "didn't", "I will": "I'll",
}  # fmt: skip
_SHORTEN = re.compile(rf"\b({'|'.join(_CONTRACTIONS)})(?= \w)")
_LENGTHEN = {short.lower(): long.lower() for long, short in _CONTRACTIONS.items()}
_IS_SHORT = re.compile(rf"\b({'|'.join(_LENGTHEN)})\b")
_PREFIXES = (
    "hi, ",
    "hello, ",
    "hey, ",
    "please, ",
    "ok, ",
    "so, ",
    "um, ",
    "well, ",
    "hi! ",
    "hello! ",
    "quick question: ",
)
_SUFFIXES = (" please?", ", please?", "? Thanks!", "? Thank you.")
_PREFIX_KEY = re.compile(r"^(?:(?:hi|hello|hey|please|ok|so|um|well|quick question) )+(?=\S+ \S)")
_SUFFIX_KEY = re.compile(r"(?: (?:please|thanks|thank you))+$")
_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{([aA] )?(\w+)\}(s?)")


@dataclass(frozen=True)
class Wordings:
    """One set of templates, divided into those for training and those for evaluation."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def draw(self, rng: random.Random, held_out: bool) -> str:
        return disguised(rng, rng.choice(self.held_out if held_out else self.train))

    @classmethod
    def divide(cls, name: str, templates: Iterable[str]) -> Wordings:
        by_key = {key_of(template): template for template in reversed(list(templates))}
        keys = sorted(by_key, key=lambda key: zlib.crc32(f"{name}: {key}".encode()))
        cut = max(1, round(HELD_OUT_SHARE * len(keys)))
        return cls(tuple(by_key[key] for key in keys[cut:]), tuple(by_key[key] for key in keys[:cut]))


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


def expanded(template: str) -> Iterator[str]:
    """All texts that "[a|b]" in a template stands for."""
    pieces = _ALTERNATIVES.split(template)
    choices = [piece.split("|") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    for parts in itertools.product(*choices):
        yield re.sub(r" +(?=[ ?.!]|$)", "", "".join(parts))


def key_of(text: str) -> str:
    """The same for all disguises of a wording: it decides what is held out."""
    key = _IS_SHORT.sub(lambda found: _LENGTHEN[found[0]], text.lower())
    key = " ".join(re.sub(r"[^\w{} +*/=[-]", "", key).split())
    key = _PREFIX_KEY.sub("", key)
    short = _SUFFIX_KEY.sub("", key)
    return (short if " " in short else key) or text


def disguised(rng: random.Random, text: str) -> str:
    """A wording as somebody might type it: contractions, politeness, case, punctuation, a typo."""
    if rng.random() < 0.25:
        text = _SHORTEN.sub(lambda found: _CONTRACTIONS[found[0]], text, count=1)
    if text[-1] == "?" and len(text) > 2:
        if rng.random() < 0.12:
            text = rng.choice(_PREFIXES) + text
        if rng.random() < 0.06:
            text = text[:-1] + rng.choice(_SUFFIXES)
    if rng.random() < 0.03:
        text = _with_typo(rng, text)
    style = rng.random()
    text = _lowered(text) if style < 0.18 else sentence(text)
    if text[-1] in ".?!" and len(text) > 3:
        style = rng.random()
        if style < 0.18:
            text = text[:-1]
        elif style < 0.21:
            text += text[-1]
    return text


def _lowered(text: str) -> str:
    return "".join(part if part.startswith("{") else part.lower() for part in re.split(r"(\{[^}]*\})", text))


def _with_typo(rng: random.Random, text: str) -> str:
    """Two neighbouring letters inside one word change places."""
    words = text.split(" ")
    places = [place for place, word in enumerate(words) if len(word) > 4 and word.isalpha()]
    if not places:
        return text
    place = rng.choice(places)
    word = words[place]
    cut = rng.randrange(1, len(word) - 2)
    words[place] = word[:cut] + word[cut + 1] + word[cut] + word[cut + 2 :]
    return " ".join(words)


def sentence(text: str) -> str:
    """With a capital first letter, unless it is a name that has none."""
    return text if text.startswith("hybridkv") else text[0].upper() + text[1:]


_ODD_PLURALS = dict(
    pair.split("/")
    for pair in [
        "mouse/mice",
        "sheep/sheep",
        "foot/feet",
        "goose/geese",
        "wolf/wolves",
        "knife/knives",
        "shelf/shelves",
        "deer/deer",
        "fish/fish",
        "potato/potatoes",
        "mango/mangoes",
        "salmon/salmon",
        "trout/trout",
        "cod/cod",
        "person/people",
        "tooth/teeth",
        "moose/moose",
    ]
)


def plural(word: str) -> str:
    if word in _ODD_PLURALS:
        return _ODD_PLURALS[word]
    if word.endswith(("s", "x", "ch", "sh")):
        return f"{word}es"
    return f"{word[:-1]}ies" if word.endswith("y") and word[-2] not in "aeiou" else f"{word}s"


def filled(template: str, row: Row, without_article: frozenset[str] = frozenset()) -> str:
    """A template with values in its slots: {x}, {a x} with an article, {x}s as a plural."""

    def value(found: re.Match[str]) -> str:
        article, slot, is_plural = found.groups()
        word = row[slot]
        if is_plural:
            return word if word in without_article else plural(word)
        if article and word not in without_article:
            word = f"{'an' if word[0] in 'aeio' or word == 'umbrella' else 'a'} {word}"
        return sentence(word) if article == "A " else word

    return _SLOT.sub(value, template) if "{" in template else template


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
