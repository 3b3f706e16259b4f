"""Conversations that teach the demo model to talk: `conversation(rng)` returns the messages of one.

What is said is data: intents.toml, tables.toml and words.toml. This module puts it together: who the model is and what
it knows, small talk, facts about the user that are asked for later, and questions that the model must decline.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from intents import Intent, load_intents, load_tables, read
from wordings import Row, Wordings, filled, sentence

Message = dict[str, str]

_INTENTS = load_intents()
_TABLES = load_tables()
_BY_NAME = {intent.name: intent for intents in (*_INTENTS.values(), _TABLES) for intent in intents}
_WORDS = read("words.toml")
_LISTS: dict[str, list[str]] = {
    name: [item.strip() for item in text.split(";")] if ";" in text else text.split()
    for name, text in _WORDS["lists"].items()
}
_LISTS["noun"] = [
    row["x"]
    for row in _BY_NAME["category"].rows
    if row["x"].islower() and row["x"] not in _BY_NAME["legs"].without_article
]
_LISTS["age"] = [str(age) for age in range(5, 99)]
_UNKNOWN = Wordings.divide("unknown", _WORDS["unknown"]["ask"])
_UNKNOWN_SAY: list[str] = _WORDS["unknown"]["say"]
_SYLLABLES: list[str] = _LISTS.pop("syllable")
_ENDINGS = ["", "n", "r", "l", "s", "x", "m", "k", "nd", "rt"]

_AREAS = {"identity": 17, "hybridkv": 24, "talk": 17, "fact": 10, "table": 18, "unknown": 14}
"""How often an ordinary turn comes from each area."""
_MEMORY_SHARE = 0.27
_SYSTEM_SHARE = 0.22


@dataclass(frozen=True)
class _Fact:
    """A kind of thing that users say about themselves."""

    name: str
    tell: Wordings
    ask: Wordings
    values: str
    also: str | None
    ok: list[str]
    answer: list[str]
    none: list[str]

    def draw(self, rng: random.Random) -> Row:
        row = {"v": _value(rng, self.values)}
        return {**row, "w": rng.choice(_LISTS[self.also])} if self.also else row


_FACTS = [
    _Fact(
        name,
        Wordings.divide(f"{name} tell", entry["tell"]),
        Wordings.divide(f"{name} ask", entry["ask"]),
        entry["values"],
        entry.get("also"),
        *(entry[key] for key in ("ok", "answer", "none")),
    )
    for name, entry in _WORDS["memory"].items()
]
_META = {name: Wordings.divide(name, entry["ask"]) for name, entry in _WORDS["meta"].items()}


def conversation(rng: random.Random, held_out: bool = False) -> list[Message]:
    """The messages of one conversation. With `held_out`, all wordings are ones that training never sees."""
    talk = _Talk(rng, held_out)
    if rng.random() < _MEMORY_SHARE:
        talk.about_the_user(rng.choices(range(1, 7), (10, 25, 25, 18, 12, 10))[0])
    else:
        talk.about_anything(rng.choices(range(1, 7), (48, 20, 13, 9, 6, 4))[0])
    return talk.messages


def held_out_questions() -> list[tuple[str, str, re.Pattern[str]]]:
    """(intent, question, pattern that a right answer matches): questions in wordings that training never sees."""
    return [(name, question, pattern) for name, question, pattern, _ in held_out_cases()]


def held_out_cases(rows_each: int = 12) -> Iterator[tuple[str, str, re.Pattern[str], list[str]]]:
    """`held_out_questions` with the right answers; of tables, `rows_each` rows for each wording."""
    rng = random.Random(0)
    for intent in _BY_NAME.values():
        for template in intent.ask.held_out:
            for row in rng.sample(intent.rows, min(rows_each, len(intent.rows))):
                yield intent.name, sentence(intent.question(template, row)), intent.pattern(row), intent.answers(row)
    declines = re.compile("|".join(_WORDS["unknown"]["must"]), re.IGNORECASE)
    for template in _UNKNOWN.held_out:
        for _ in range(3):
            yield "unknown", sentence(filled(template, _Fresh(rng))), declines, _UNKNOWN_SAY
    for fact in _FACTS:
        for tell in fact.tell.held_out:
            for ask in fact.ask.held_out:
                for _ in range(3):
                    row = fact.draw(rng)
                    question = f"{sentence(filled(tell, row))} {sentence(filled(ask, row))}"
                    pattern = re.compile(rf"\b{re.escape(row['v'])}\b")
                    yield f"memory.{fact.name}", question, pattern, [filled(text, row) for text in fact.answer]


@dataclass
class _Talk:
    """A conversation that is being written."""

    rng: random.Random
    held_out: bool
    messages: list[Message] = field(default_factory=list)
    known: dict[str, tuple[_Fact, Row]] = field(default_factory=dict)
    is_brief: bool = False

    def __post_init__(self) -> None:
        if self.rng.random() < _SYSTEM_SHARE:
            systems = _WORDS["systems"]
            self.is_brief = self.rng.random() < 0.25
            self._write("system", self.rng.choice(systems["brief" if self.is_brief else "plain"]))

    def about_anything(self, turns: int) -> None:
        has_greeting = turns > 1 and self.rng.random() < 0.35
        last = self.rng.choice(["thanks", "bye", "bye"]) if turns > 2 and self.rng.random() < 0.35 else None
        for turn in range(turns):
            if turn == 0 and has_greeting:
                self._intent(_BY_NAME[f"talk.{self.rng.choice(['hello', 'hello', 'hello', 'morning', 'how_are_you'])}"])
            elif turn == turns - 1 and last:
                self._intent(_BY_NAME[f"talk.{last}"])
            elif self.rng.random() < (0.1 if turn else 0.01):
                self._meta()
            else:
                self._anything()

    def about_the_user(self, turns: int) -> None:
        """Facts are told, other things are talked about, and the facts are asked for."""
        if turns == 1:
            self.rng.choices((self._tell_and_ask, self._ask_unknown), (80, 20))[0]()
            return
        for turn in range(turns):
            self._user_turn(turn == 0, turn == turns - 1)()

    def _user_turn(self, is_first: bool, is_last: bool) -> Callable[[], None]:
        turns = (self._tell, self._ask, self._meta, self._anything, self._tell_and_ask, self._ask_unknown)
        if is_first:
            weights = (75, 0, 0, 17, 3, 5)
        elif not self.known:
            weights = (70, 0, 12, 10, 3, 5)
        elif is_last:
            weights = (0, 80, 18, 0, 2, 0)
        else:
            weights = (16, 26, 12, 38, 2, 6)
        return self.rng.choices(turns, weights)[0]

    def _write(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def _turn(self, question: str, answers: list[str]) -> None:
        self._write("user", question)
        self._write("assistant", min(answers, key=len) if self.is_brief else self.rng.choice(answers))

    def _anything(self) -> None:
        area = self.rng.choices(list(_AREAS), list(_AREAS.values()))[0]
        if area == "unknown":
            self._turn(filled(_UNKNOWN.draw(self.rng, self.held_out), _Fresh(self.rng)), _UNKNOWN_SAY)
        elif area == "table":
            self._intent(self.rng.choice(_TABLES))
        elif area == "talk" and self.rng.random() < 0.45:
            self._intent(
                _BY_NAME[f"talk.{self.rng.choice(['hello', 'how_are_you', 'story', 'interesting', 'joke', 'thanks'])}"]
            )
        elif area == "identity" and self.rng.random() < 0.25:
            self._intent(_BY_NAME[f"identity.{self.rng.choice(['who', 'who', 'can_do', 'name'])}"])
        elif area == "hybridkv" and self.rng.random() < 0.1:
            self._intent(_BY_NAME["hybridkv.what"])
        else:
            self._intent(self.rng.choice(_INTENTS[area]))

    def _intent(self, intent: Intent) -> None:
        template, row = intent.ask.draw(self.rng, self.held_out), self.rng.choice(intent.rows)
        question = intent.question(template, row)
        is_lower = template[0].islower() and self.rng.random() < 0.5
        self._turn(question.lower() if is_lower else question, intent.answers(row))

    def _tell(self) -> None:
        told = self.rng.sample(_FACTS, 2 if self.rng.random() < 0.15 else 1)
        if self.rng.random() < 0.3 and "name" not in self.known:
            told[0] = _FACTS[0]
        parts, replies = [], []
        for fact in {fact.name: fact for fact in told}.values():
            template, row = fact.tell.draw(self.rng, self.held_out), fact.draw(self.rng)
            if template[0].islower() and self.rng.random() < 0.4:
                row = {slot: value.lower() for slot, value in row.items()}
            self.known[fact.name] = (fact, row)
            parts.append(sentence(filled(template, row)) if template[0] != "{" else filled(template, row))
            fits = fact.ok if len(told) == 1 else [text for text in fact.ok if "?" not in text]
            replies.append(sentence(filled(self.rng.choice(fits), row)))
        self._turn(_joined(parts), [" ".join(replies)])

    def _ask(self) -> None:
        fact, row = self.rng.choice(list(self.known.values()))
        question = filled(fact.ask.draw(self.rng, self.held_out), row)
        self._turn(question, [filled(text, row) for text in fact.answer])

    def _tell_and_ask(self) -> None:
        fact = _FACTS[0] if self.rng.random() < 0.3 else self.rng.choice(_FACTS)
        row = fact.draw(self.rng)
        self.known[fact.name] = (fact, row)
        parts = [filled(wordings.draw(self.rng, self.held_out), row) for wordings in (fact.tell, fact.ask)]
        self._turn(_joined(parts), [filled(text, row) for text in fact.answer])

    def _ask_unknown(self) -> None:
        """Asks for something that the user has not told."""
        fact = self.rng.choice([fact for fact in _FACTS if fact.name not in self.known] or _FACTS)
        if fact.name in self.known:
            self._ask()
            return
        row = fact.draw(self.rng)
        question = filled(fact.ask.draw(self.rng, self.held_out), row)
        self._turn(question, [filled(text, row) for text in fact.none])

    def _meta(self) -> None:
        """A question about the conversation: the last answer, the last message or the first one."""
        kind = self.rng.choices(("again", "asked", "first"), (50, 35, 15))[0]
        entry = _WORDS["meta"][kind]
        mine = [message["content"] for message in self.messages if message["role"] == "user"]
        answers = entry["none"]
        if mine and kind == "again":
            answers = [self.messages[-1]["content"]]
        elif mine:
            answers = [filled(text, {"v": mine[0 if kind == "first" else -1]}) for text in entry["answer"]]
        self._turn(_META[kind].draw(self.rng, self.held_out), answers)


def _joined(parts: list[str]) -> str:
    return " ".join([part if part[-1] in ".?!" else f"{part}." for part in parts[:-1]] + parts[-1:])


def _value(rng: random.Random, kind: str) -> str:
    """A value of a list, or a made-up one where any word will do."""
    if kind == "number":
        return str(rng.randrange(1, 10 ** rng.randrange(1, 5)))
    if kind == "word":
        return rng.choice(_LISTS["noun"]) if rng.random() < 0.5 else _made_up(rng)
    if kind in ("name", "pet_name", "city") and rng.random() < 0.25:
        return sentence(_made_up(rng))
    return rng.choice(_LISTS[kind])


def _made_up(rng: random.Random) -> str:
    return "".join(rng.choices(_SYLLABLES, k=rng.randrange(2, 4))) + rng.choice(_ENDINGS)


class _Fresh(dict[str, str]):
    """Slots of a template, each drawn when it is asked for: two cities of one question differ."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def __missing__(self, slot: str) -> str:
        if slot == "made":
            return _made_up(self._rng)
        if slot == "year":
            return str(self._rng.randrange(1500, 2031))
        if slot == "n":
            return str(self._rng.randrange(2, 21))
        if slot == "big":
            return str(self._rng.randrange(21, 10000))
        return self._rng.choice(_LISTS[slot])
