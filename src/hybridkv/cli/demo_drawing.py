"""Draws what the acts of `hybridkv demo` have measured. Knows records; runs nothing."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from hybridkv.demo.records import Answer, Comparison, Corruption, Figures, Restart
from hybridkv.units import format_bytes

if TYPE_CHECKING:
    from hybridkv.engine import Engine

_ACTS = {
    "read": ("A document is read", "The first question about it computes every token of it."),
    "ask": (
        "More questions about it",
        "Each resumes at the end of the document, from memory. Each is asked again without the cache, to compare.",
    ),
    "restart": (
        "The engine restarts",
        "A new engine has empty memory. It loads the document from disk, layer by layer, while the model computes.",
    ),
    "corrupt": (
        "A stored object is damaged",
        "Bytes of one object on disk are flipped, and the engine restarts. It must notice, and compute instead.",
    ),
}
_NEXT = (
    ("hybridkv serve", "serve this model to OpenAI's clients"),
    ('hybridkv chat "$(hybridkv demo --path)"', "talk to it"),
    ("hybridkv serve /path/to/checkpoint", "your own model"),
)
_INDENT = "   "
_BAR_CELLS = 40


class Stage:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._acts = 0

    def busy(self, what: str) -> AbstractContextManager[object]:
        """A line that moves while something runs. Only on a terminal."""
        return self._console.status(f"{what} ...")

    def wait_for_imports(self) -> None:
        """A line that stays: Ctrl-C during imports ends the process, and would leave a terminal without its cursor."""
        self._say(Text("loading torch and the model ...", style="dim"))

    def open(self, engine: Engine) -> None:
        groups = ", ".join(f"{len(group.layers)} {group.kind.replace('_', ' ')}" for group in engine.plan.groups)
        self._say(Text.assemble((engine.model_name, "bold"), f" on {engine.device}: {groups} layers"))

    def announce(self, act: str) -> None:
        title, sentence = _ACTS[act]
        self._acts += 1
        self._say(Text.assemble("\n", (f"{self._acts}  {title}", "bold cyan")))
        self._tell((sentence, "dim"))

    def draw_answer(self, answer: Answer) -> None:
        self._exchange(answer)
        self._tell(_cached(answer), f"first token after {_ms(answer.ttft_s)}")

    def draw_comparison(self, one: Comparison) -> None:
        self._exchange(one.cached)
        self._tell(_cached(one.cached), f"first token after {_ms(one.cached.ttft_s)}")
        self._tell(f"without the cache after {_ms(one.cold.ttft_s)}: ", (f"{one.ratio:.1f} times as long", "bold"))
        if not one.cold.is_right:
            self._tell(("✗ ", "bold red"), f"without the cache: {one.cold.text}")

    def draw_restart(self, one: Restart) -> None:
        self._exchange(one.answer)
        self._tell(
            f"{one.loaded_tokens:,} tokens loaded from disk, {format_bytes(one.loaded_bytes)}, "
            f"{'layer by layer' if one.layerwise_loads else 'before the first layer'}; ",
            f"first token after {_ms(one.answer.ttft_s)}",
        )

    def draw_corruption(self, one: Corruption) -> None:
        self._tell(f"{one.flipped_bytes} bytes are flipped in {_short(one.object_name)}")
        self._exchange(one.answer)
        self._tell(
            f"corrupt objects noticed: {one.corrupt_objects}; {one.computed_tokens:,} tokens computed instead; ",
            f"first token after {_ms(one.answer.ttft_s)}",
        )
        for line in one.log:
            self._tell((f"log: {_short(line)}", "dim"))

    def close(self, figures: Figures) -> None:
        """Times side by side, what was seen, and what to try next."""
        self._say(Text("\nTime to the first token, by where the document came from", style="bold cyan"))
        times = figures.first_tokens()
        for name, seconds in times.items():
            bar = "█" * max(1, round(_BAR_CELLS * seconds / max(times.values())))
            self._tell(f"{name:<15} {_ms(seconds):>9}  ", (bar, "cyan"))
        problems, count = figures.problems(), sum(1 for _ in figures.answers())
        self._say(Text())
        for problem in problems:
            self._say(Text.assemble(("✗ ", "bold red"), problem))
        if not problems:
            seen = f"All {count} answers are right: computed, from memory, from disk, and after damage"
            self._say(Text.assemble(("✓ ", "bold green"), f"{seen}. {figures.seconds:.0f} s in all."))
        self._say(Text("\nNext", style="bold cyan"))
        for command, meaning in _NEXT:
            self._tell((f"{command:<40}", "bold"), f" {meaning}")

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _exchange(self, answer: Answer) -> None:
        """The question, the answer, and whether it is right."""
        mark = ("✓ ", "bold green") if answer.is_right else ("✗ ", "bold red")
        wanted = "" if answer.is_right else f" (expected: {answer.expected})"
        self._tell((f"> {answer.question}\n", "bold"), mark, answer.text, (wanted, "red"))

    def _tell(self, *parts: str | tuple[str, str]) -> None:
        """A paragraph, indented. Nothing is written behind the end of its lines."""
        for line in Text.assemble(*parts).wrap(self._console, self._console.width - len(_INDENT)):
            line.rstrip()
            self._say(Text(_INDENT) + line)

    def _say(self, what: Text) -> None:
        self._console.print(what, highlight=False)


def _cached(answer: Answer) -> str:
    return f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} prompt tokens cached; "


def _short(text: str) -> str:
    """With the first digits of every long hexadecimal number only."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1...", text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
