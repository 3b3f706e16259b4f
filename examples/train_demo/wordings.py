"""Templates of questions and answers: expands them, fills their slots, and writes them as different people would.

About a tenth of each set of wordings is held out: training never sees them, and evaluation asks nothing else.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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
    if text[-1] in ".?!" and len(text) > 2 and text[-2].isalnum():
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


_ODD_PLURALS = {
    "mouse": "mice", "foot": "feet", "goose": "geese", "tooth": "teeth", "person": "people", "wolf": "wolves",
    "knife": "knives", "shelf": "shelves", "potato": "potatoes", "mango": "mangoes", "sheep": "sheep", "deer": "deer",
    "fish": "fish", "salmon": "salmon", "trout": "trout", "cod": "cod", "moose": "moose",
}  # fmt: skip


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
