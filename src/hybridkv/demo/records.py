"""What the acts of the demo have measured. Plain data: no engine, no drawing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to one question about the document."""

    question: str
    expected: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    is_right: bool
    """Whether the text contains what is expected."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question, asked twice: with the cache, and under a salt of its own, which shares nothing."""

    cached: Answer
    cold: Answer

    @property
    def ratio(self) -> float:
        return self.cold.ttft_s / self.cached.ttft_s


@dataclass(frozen=True, slots=True)
class Restart:
    """A question to a new engine that finds the document in its store."""

    answer: Answer
    loaded_tokens: int
    loaded_bytes: int
    layerwise_loads: int


@dataclass(frozen=True, slots=True)
class Corruption:
    """A question to a new engine, one of whose stored objects has been damaged."""

    answer: Answer
    object_name: str
    flipped_bytes: int
    corrupt_objects: int
    """Objects that the store has found corrupt."""
    log: tuple[str, ...]
    """What the engine logged about it."""

    @property
    def computed_tokens(self) -> int:
        return self.answer.prompt_tokens - self.answer.cached_tokens


@dataclass(slots=True)
class Figures:
    """All records of one run, in the order of the acts."""

    model: str
    device: str
    read: Answer
    comparisons: list[Comparison] = field(default_factory=list)
    restart: Restart | None = None
    corruption: Corruption | None = None
    seconds: float = 0.0

    def answers(self) -> Iterator[Answer]:
        yield self.read
        for one in self.comparisons:
            yield one.cached
            yield one.cold
        if self.restart is not None:
            yield self.restart.answer
        if self.corruption is not None:
            yield self.corruption.answer

    def first_tokens(self) -> dict[str, float]:
        """Seconds to the first token, by where the document came from. Medians, where there are several."""
        found = {
            "computed": median([one.cold.ttft_s for one in self.comparisons] or [self.read.ttft_s]),
            "from memory": median([one.cached.ttft_s for one in self.comparisons] or [self.read.ttft_s]),
        }
        if self.restart is not None:
            found["from disk"] = self.restart.answer.ttft_s
        if self.corruption is not None:
            found["corrupt on disk"] = self.corruption.answer.ttft_s
        return found

    def problems(self) -> list[str]:
        """Everything that did not go as the acts say it does."""
        right = [one.is_right for one in self.answers()]
        found = [] if all(right) else [f"{right.count(False)} of {len(right)} answers are wrong."]
        if self.read.cached_tokens or any(one.cold.cached_tokens for one in self.comparisons):
            found.append("A question that should have been computed found cached tokens.")
        if not all(one.cached.cached_tokens for one in self.comparisons):
            found.append("A question about the document found nothing in the cache.")
        if self.restart is not None and not self.restart.loaded_tokens:
            found.append("The new engine loaded nothing from its store.")
        if self.corruption is not None and not self.corruption.corrupt_objects:
            found.append("The damaged object was not noticed.")
        return found

    def as_json(self) -> dict[str, Any]:
        """All figures, as `json.dumps` takes them."""
        comparisons = [{**asdict(one), "ratio": one.ratio} for one in self.comparisons]
        derived = {"comparisons": comparisons, "first_token_s": self.first_tokens(), "problems": self.problems()}
        return asdict(self) | derived
