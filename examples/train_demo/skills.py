"""Exact skills that a wrong cache would break: recall, lookups, questions about a document, repeating, counting.

Each function here makes one conversation with a single right answer to every question: values are random, so a model
can only know them by reading them in its context. `held_out=True` asks with wordings that training never sees.
What is said stands in skills.toml. Nothing here knows tokens.
"""

from __future__ import annotations

import json
import random
import re
import string
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class Material:
    """What conversations are filled with: words that values are drawn from, and paragraphs between facts."""

    words: Sequence[str]
    paragraphs: Sequence[str]

    def filler(self, rng: random.Random, chars: int) -> list[str]:
        """Paragraphs of about `chars` characters together."""
        found: list[str] = []
        while chars > 40:
            text = rng.choice(self.paragraphs)
            if len(text) > chars + 40:
                cut = text.rfind(". ", 0, chars)
                text = text[: cut + 1] if cut > 20 else text[: text.rfind(" ", 0, chars)] + "."
            found.append(text)
            chars -= len(text) + 1
        return found


_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("skills.toml").read_text())
_LISTS: dict[str, list[str]] = {name: text.split() for name, text in _DATA["lists"].items()}
_PLACE_WORDS = _LISTS["colours"] + _LISTS["sides"]
HELD_OUT: dict[str, Any] = json.loads(Path(__file__).with_name("held_out.json").read_text())
"""Wordings that training never sees. Someone else wrote them, without a look at skills.toml."""

_START = ["br", "cr", "d", "f", "gl", "h", "k", "l", "m", "n", "p", "qu", "r", "s", "st", "t", "tr", "v", "w", "z"]
_VOWELS = ["a", "e", "i", "o", "u", "ea", "oo"]
_TAILS = ["er", "ish", "ing", "ment", "able", "ling", "ful", "ory", "ock", "ato"]
_END = ["den", "ford", "mouth", "wick", "ton", "field", "stow", "by", "ham", "low", "mere"]


def place_name(rng: random.Random) -> str:
    """A made-up town: no model can know it."""
    return (rng.choice(_START) + rng.choice(_VOWELS) + rng.choice("lnrstvmk") + rng.choice(_END)).capitalize()


def person(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return f"{made_up(rng).capitalize()} {made_up(rng).capitalize()}"
    return f"{rng.choice(_LISTS['first'])} {rng.choice(_LISTS['last'])}"


def code(rng: random.Random) -> str:
    """Letters and digits, such as K7QX2 or AB-4821."""
    letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, 3)))
    digits = "".join(rng.choices(string.digits, k=rng.randint(2, 4)))
    return rng.choice((f"{letters}{digits}", f"{letters}-{digits}", f"{digits}{letters}"))


def number(rng: random.Random) -> str:
    return str(rng.randint(10 ** rng.randint(1, 4), 10**5))


def made_up(rng: random.Random) -> str:
    """A word that no text has, such as drelvoon."""
    return "".join(rng.choice(_START) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3))) + rng.choice("lnrstvmk")


def token(rng: random.Random) -> str:
    """What machines call a key: letters and digits in no order, or words and numbers with hyphens."""
    if rng.random() < 0.5:
        return "-".join(rng.choice((made_up, number))(rng) for _ in range(rng.randint(2, 3)))
    letters = rng.choice((string.ascii_lowercase, string.ascii_uppercase, "abcdef", string.ascii_letters))
    return "".join(rng.choices(letters + string.digits, k=rng.randint(4, 12)))


def rare_word(rng: random.Random, material: Material) -> str:
    """A word of the texts, at times with its ending changed, or one that no text has."""
    shape = rng.random()
    if shape < 0.25:
        return made_up(rng)
    text = rng.choice(material.words)
    return text + rng.choice(_TAILS) if shape < 0.4 and text[-1] not in "aeiouy" else text


def word(rng: random.Random, material: Material) -> str:
    """One word, or a pair such as "lemon tower" or "lemon-tower"."""
    text = rare_word(rng, material)
    if rng.random() < 0.2:
        text += rng.choice((" ", "-")) + rare_word(rng, material)
    return rng.choice((text, text, text, text, text, text.upper(), text.capitalize()))


VALUES: dict[str, Callable[[random.Random, Material], str]] = {
    "word": word,
    "code": lambda rng, material: code(rng) if rng.random() < 0.6 else token(rng),
    "number": lambda rng, material: number(rng),
    "name": lambda rng, material: person(rng),
    "town": lambda rng, material: place_name(rng),
    "phrase": lambda rng, material: " ".join(rng.sample(list(material.words), 2)),
}
LABELS: dict[str, list[str]] = _DATA["labels"]
OWNED: dict[str, list[str]] = _DATA["owned_labels"]
RECALL: dict[str, list[str]] = _DATA["recall"]

_NOT_LOWERED = re.compile(r"I\b|[A-Z][A-Z.]")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_QUOTED = re.compile(r"""["']\{(value|text)\}""")


def _fill(rng: random.Random, template: str, **slots: str) -> str:
    """One of the wordings of a template. `{Label}` is `{label}` with a capital."""
    template = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), template)
    template = template[:1].upper() + template[1:] if template[:1] != "{" else template
    capitals = {name.capitalize(): text[:1].upper() + text[1:] for name, text in slots.items()}
    return template.format(**slots, **capitals)


def ask(rng: random.Random, templates: Sequence[str], **slots: str) -> str:
    """A question, as different people put it."""
    template = rng.choice(templates)
    text = _fill(rng, template, **slots)
    if rng.random() < 0.3:
        text = _lead_in(rng.choice(RECALL["before"]), text, template)
    if rng.random() < 0.2 and text[-1] in ".?":
        text += rng.choice(RECALL["after"])
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:] if rng.random() < 0.5 else text.rstrip("?.")
    return text


def _lead_in(before: str, text: str, template: str) -> str:
    """`text` after some words: in lower case where it goes on with their sentence and does not start with a slot."""
    ends_sentence = before[-2] in ".!?"
    if not (ends_sentence or template.startswith("{") or _NOT_LOWERED.match(text)):
        text = text[0].lower() + text[1:]
    return before + text


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def answer_with(text: str) -> Message:
    """A reply that is either exactly this or wrong."""
    return {"role": "assistant", "content": text, "exact": "yes"}


def _chatty(rng: random.Random, text: str, template: str) -> str:
    """A statement with some words before it, after it, or both."""
    shape = rng.random()
    if shape < 0.65:
        text = _lead_in(rng.choice(RECALL["say_before"]), text, template)
    if shape > 0.35 and text[-1] in ".!?":
        text += rng.choice(RECALL["say_after"])
    return text


@dataclass(frozen=True)
class Fact:
    label: str
    value: str
    is_mine: bool = False

    @property
    def answer(self) -> str:
        return f"{'Your' if self.is_mine else 'The'} {self.label} is {self.value}."

    def say(self, rng: random.Random, templates: Sequence[str]) -> str:
        """One of the wordings of `templates` about this: with "my" where it is the user's."""
        template = rng.choice(templates)
        value = f'"{self.value}"' if not _QUOTED.search(template) and rng.random() < 0.08 else self.value
        text = _fill(rng, self._owned(template), label=self.label, value=value)
        return _chatty(rng, text, template) if rng.random() < 0.25 else text

    def ask(self, rng: random.Random, templates: Sequence[str]) -> str:
        return ask(rng, [self._owned(rng.choice(templates))], label=self.label)

    def _owned(self, template: str) -> str:
        if not self.is_mine:
            return template
        for the, my in (("the", "my"), ("The", "My"), ("THE", "MY")):
            template = template.replace(f"{the} {{label}}", f"{my} {{label}}")
        return template


def _facts(rng: random.Random, material: Material, count: int) -> list[Fact]:
    """`count` facts with different labels, none of which is part of another."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        kind = rng.choice(list(LABELS))
        label = rng.choice(LABELS[kind])
        shape = rng.random()
        if count > 1 and shape < 0.4:
            kind = rng.choice(list(OWNED))
            thing = f"{rng.choice(_PLACE_WORDS)} {rng.choice(_LISTS['things'])}"
            label = f"{rng.choice(OWNED[kind])} {rng.choice(('of', 'for'))} the {thing}"
        elif shape < 0.7:
            kind = rng.choice(list(OWNED))
            label = f"{rng.choice(material.words)} {rng.choice(OWNED[kind])}"
        if not any(label in other or other in label for other in found):
            is_mine = " the " not in label and rng.random() < 0.2
            found[label] = Fact(label, VALUES[kind](rng, material), is_mine)
    return list(found.values())


def _spread(rng: random.Random, facts: list[str], filler: list[str], first: bool) -> str:
    """Facts among paragraphs, or inside them; with `first` the first fact comes first, as far back as it can be."""
    lines = [(rng.random(), text) for text in filler]
    for i, text in enumerate(facts):
        if first and i == 0:
            lines.append((-1.0, text))
        elif filler and rng.random() < 0.4:
            at = rng.randrange(len(filler))
            lines[at] = (lines[at][0], _insert(rng, lines[at][1], text))
        else:
            lines.append((rng.random() * 0.9, text))
    return rng.choice(("\n", "\n\n", " ")).join(text for _, text in sorted(lines, key=lambda line: line[0]))


def _insert(rng: random.Random, paragraph: str, sentence: str) -> str:
    """The paragraph with one more sentence somewhere."""
    sentences = re.split(r"(?<=[.!?]) ", paragraph)
    sentences.insert(rng.randint(0, len(sentences)), sentence)
    return " ".join(sentences)


def recall(rng: random.Random, material: Material, chars: int, held_out: bool = False) -> list[Message]:
    """A value given early, text, then the question: in one message, or over several turns."""
    count = 1 if rng.random() < 0.5 else rng.randint(2, 8)
    facts = _facts(rng, material, count)
    told = [fact.say(rng, HELD_OUT["statements"] if held_out else RECALL["statements"]) for fact in facts]
    filler = material.filler(rng, chars - sum(map(len, told)))
    asked = rng.sample(facts, rng.randint(1, count))
    if held_out or rng.random() < 0.3:
        asked = [facts[0], *(fact for fact in asked if fact != facts[0])]
    questions = (
        HELD_OUT["questions"] if held_out else RECALL["vague" if count == 1 and rng.random() < 0.1 else "questions"]
    )
    turns = [(fact.ask(rng, questions), fact.answer) for fact in asked]
    messages: list[Message] = []
    if rng.random() < 0.5:
        text = _spread(rng, told, filler, first=True)
        question, answer = turns.pop(0)
        messages = [user(f"{text}\n\n{question}"), answer_with(answer)]
    else:
        messages = [user(" ".join(told)), assistant(rng.choice(RECALL["acknowledge"]))]
        while filler:
            part = [filler.pop(0) for _ in range(min(len(filler), rng.randint(1, 6)))]
            messages += [
                user(rng.choice(RECALL["text_asks"]) + "\n\n" + "\n".join(part)),
                assistant(rng.choice(RECALL["text_replies"])),
            ]
    for question, answer in turns:
        messages += [user(question), answer_with(answer)]
    return messages


def lookup(rng: random.Random, material: Material, chars: int, held_out: bool = False) -> list[Message]:
    """A table of keys and values, then questions about some of its rows."""
    kind = rng.choice(("code", "number", "word"))
    name = rng.choice(OWNED[kind])
    count = max(3, min(int(chars / 30 * rng.uniform(0.2, 1)), 60))
    rows: dict[str, str] = {}
    while len(rows) < count:
        key = person(rng) if rng.random() < 0.5 else f"the {rng.choice(_PLACE_WORDS)} {rng.choice(_LISTS['things'])}"
        rows.setdefault(key, VALUES[kind](rng, material))
    style = rng.choice(
        ("{key}: {value}", "- {key}: {value}", f"The {name} of {{key}} is {{value}}.", "{key} = {value}")
    )
    table = "\n".join(style.format(key=key, value=value) for key, value in rows.items())
    filler = "\n".join(material.filler(rng, chars - len(table)))
    head = rng.choice(
        (f"Here is a list of {name}s.", f"These are the {name}s.", f"List of {name}s:", f"{name.capitalize()}s:")
    )
    parts = [f"{head}\n{table}", filler] if rng.random() < 0.7 else [filler, f"{head}\n{table}"]
    questions = HELD_OUT["questions"] if held_out else RECALL["questions"]
    messages: list[Message] = []
    for key in rng.sample(list(rows), min(count, rng.randint(2, 8))):
        label = f"{name} of {key}"
        question = ask(rng, questions, label=label if rng.random() < 0.8 else f"{name} for {key}")
        if not messages:
            question = "\n\n".join((*filter(None, parts), question))
        messages += [user(question), answer_with(f"The {label} is {rows[key]}.")]
    return messages


@dataclass(frozen=True)
class Attribute:
    """One thing that a document says of a subject: how it is said, asked for and answered."""

    name: str
    said: list[str]
    asked: list[str]
    answer: str


ATTRIBUTE_VALUES: dict[str, Callable[[random.Random], str]] = {
    "job": lambda rng: rng.choice(_LISTS["jobs"]),
    "home town": place_name,
    "pet": lambda rng: rng.choice(_LISTS["pets"]),
    "favourite food": lambda rng: rng.choice(_LISTS["foods"]),
    "age": lambda rng: str(rng.randint(11, 99)),
    "day of arrival": lambda rng: f"{rng.choice(_LISTS['days'])}, {rng.choice(_LISTS['months'])} {rng.randint(1, 28)}",
    "content": lambda rng: f"{rng.randint(2, 60)} {rng.choice(_LISTS['goods'])}",
    "owner": person,
    "price": number,
    "departure time": lambda rng: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}",
    "platform": lambda rng: str(rng.randint(1, 24)),
}
PEOPLE, PLACES, TRAINS = (
    [Attribute(**attribute) for attribute in _DATA["document"][genre]] for genre in ("people", "places", "trains")
)
GENRES: list[tuple[list[Attribute], Callable[[random.Random], str]]] = [
    (PEOPLE, person),
    (PEOPLE, person),
    (PLACES, lambda rng: f"{rng.choice(_PLACE_WORDS)} {rng.choice(_LISTS['things'])}"),
    (TRAINS, place_name),
]
_POSSESSIVE = [
    template.replace("the {label}", "{label}").replace("The {label}", "{Label}").replace("THE {label}", "{label}")
    for template in RECALL["questions"]
    if re.search(r"\bthe \{label\}|\{Label\}", template, re.IGNORECASE)
]
"""Questions for what belongs to someone, without an article."""
_NOT_SAID = "The text does not say that."


def _ask_about(rng: random.Random, attribute: Attribute, who: str, held_out: bool) -> str:
    """In the attribute's own words, or for its name, as one asks for a key."""
    if held_out:
        return ask(rng, HELD_OUT["document"][attribute.name], who=who)
    if rng.random() < 0.55:
        return ask(rng, attribute.asked, who=who)
    subject = f"the {who}" if attribute in PLACES else f"the train to {who}" if attribute in TRAINS else who
    if rng.random() < 0.5:
        return ask(rng, RECALL["questions"], label=f"{attribute.name} of {subject}")
    return ask(rng, _POSSESSIVE, label=f"{subject}'s {attribute.name}")


def document(rng: random.Random, material: Material, chars: int, held_out: bool = False) -> list[Message]:
    """A text that says things about people, places or trains, then questions about it."""
    attributes, subject = rng.choice(GENRES)
    subjects = list({subject(rng) for _ in range(rng.randint(2, max(3, min(24, chars // 150))))})
    facts = [
        (who, attribute, ATTRIBUTE_VALUES[attribute.name](rng))
        for who in subjects
        for attribute in rng.sample(attributes, rng.randint(1, len(attributes)))
    ]
    sentences: dict[str, list[str]] = {}
    for who, attribute, value in facts:
        sentences.setdefault(who, []).append(rng.choice(attribute.said).format(who=who, value=value))
    paragraphs = [" ".join(told) for told in sentences.values()]
    if rng.random() < 0.4:
        paragraphs = [sentence for told in sentences.values() for sentence in told]
    filler = material.filler(rng, chars - sum(map(len, paragraphs)))
    text = rng.choice(_DATA["document"]["heads"]) + _spread(rng, paragraphs, filler, first=False)
    turns = []
    for who, attribute, value in rng.sample(facts, min(len(facts), rng.randint(2, 8))):
        turns.append((_ask_about(rng, attribute, who, held_out), attribute.answer.format(who=who, value=value)))
    if not held_out and rng.random() < 0.15:
        stranger = subject(rng)
        if stranger not in subjects:
            turns.append((_ask_about(rng, rng.choice(attributes), stranger, held_out), _NOT_SAID))
            rng.shuffle(turns)
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages = [{"role": "system", "content": text}]
    for i, (question, answer) in enumerate(turns):
        shown = f"{text}\n\n{question}" if i == 0 and not messages else question
        messages += [user(shown), answer_with(answer)]
    return messages


def repeat(rng: random.Random, material: Material, chars: int, held_out: bool = False) -> list[Message]:
    """A sentence, a list or a code to say again; after other text."""
    messages: list[Message] = []
    limit = 700 if rng.random() < 0.2 else 120
    for i in range(rng.randint(1, 4)):
        shape = rng.random()
        if shape < 0.35:
            text = rng.choice((" ", " ", ", ")).join(rare_word(rng, material) for _ in range(rng.randint(1, 4)))
            text = rng.choice((text, text, text.capitalize(), text + "."))
        elif shape < 0.5:
            text = ", ".join(rng.choices(material.words, k=rng.randint(1, 12)))
        elif shape < 0.65:
            text = " ".join(
                rng.choice((code, number, person, place_name, token))(rng) for _ in range(rng.randint(1, 5))
            )
        else:
            text = " ".join(material.filler(rng, rng.randint(50, limit)))
        templates: list[str] = HELD_OUT["repeat"] if held_out else _DATA["repeat"]["asked"]
        if '"' in text:
            templates = [template for template in templates if not _QUOTED.search(template)]
        template = rng.choice(templates)
        has_marks = '"' in text or _QUOTED.search(template)
        asked = _fill(rng, template, text=f'"{text}"' if not has_marks and rng.random() < 0.1 else text)
        if i == 0 and chars > 300:
            asked = "\n".join(material.filler(rng, chars - 200)) + "\n\n" + asked
        messages += [user(asked), answer_with(text)]
    return messages


def count(rng: random.Random, material: Material, chars: int, held_out: bool = False) -> list[Message]:
    """Numbers in order, and how many things a list has; after other text."""
    messages: list[Message] = []
    for i in range(rng.randint(1, 4)):
        question, answer = _count_up(rng, held_out) if rng.random() < 0.55 else _count_items(rng, held_out)
        if i == 0 and chars > 300:
            question = "\n".join(material.filler(rng, chars - 200)) + "\n\n" + question
        messages += [user(question), answer_with(answer)]
    return messages


def _count_up(rng: random.Random, held_out: bool) -> tuple[str, str]:
    step = rng.choice((1, 1, 1, 1, 2, 5, 10))
    start = rng.choice((1, 1, rng.randint(0, 20), rng.randint(0, 200)))
    start -= start % step if step > 2 else 0
    stop = start + step * rng.randint(2, 20)
    by = {1: "", 2: " by twos", 5: " by fives", 10: " by tens"}[step]
    numbers = [str(n) for n in range(start, stop + 1, step)]
    backwards = step == 1 and rng.random() < 0.25
    if backwards:
        numbers.reverse()
    kept = ("Name the numbers from {a} to {b}{by}.", "Let me hear you count from {a} up to {b}{by}.")
    down_kept = ("Say the numbers backwards from {a} to {b}.",)
    seen: list[str] = _DATA["count"]["down" if backwards else "up"]
    template = rng.choice((down_kept if backwards else kept) if held_out else seen)
    return _fill(rng, template, a=numbers[0], b=numbers[-1], by=by), ", ".join(numbers) + "."


def _count_items(rng: random.Random, held_out: bool) -> tuple[str, str]:
    items = rng.choices(rng.sample(_LISTS["fruit"], rng.randint(2, 5)), k=rng.randint(1, 12))
    listed = ", ".join(items)
    if rng.random() < 0.5:
        kept = ("Tell me the number of words in this list: {x}.",)
        answer = f"There are {len(items)}." if len(items) > 1 else "There is 1."
        return _fill(rng, rng.choice(kept if held_out else _DATA["count"]["items"]), x=listed), answer
    item = rng.choice(items)
    kept = ("Tell me how often {i} is in this list: {x}.",)
    times = items.count(item)
    answer = f"It appears {times} time{'s' if times > 1 else ''}."
    return _fill(rng, rng.choice(kept if held_out else _DATA["count"]["times"]), i=item, x=listed), answer


SKILLS: dict[str, Callable[[random.Random, Material, int, bool], list[Message]]] = {
    "recall": recall,
    "lookup": lookup,
    "document": document,
    "repeat": repeat,
    "count": count,
}
