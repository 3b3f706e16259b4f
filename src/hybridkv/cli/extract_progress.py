"""The bar of `hybridkv extract`, and what it counts."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybridkv.cli.extract_run import Done


class SampleBar:
    """Counts samples, and shows them with tokens a second and the time left, on a terminal alone."""

    def __init__(self, num_samples: int, num_before: int) -> None:
        self.num_written = self.num_tokens = self.num_cut = self.nbytes = 0
        self.errors: list[str] = []
        screen = Console(stderr=True)  # standard output is for the summary
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=screen,
            disable=not screen.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("Extracting", total=num_samples, completed=num_before, speed=0.0)
        self._began = time.monotonic()

    def count(self, done: Done) -> None:
        if done.error is not None:
            self.errors.append(done.error)
        else:
            self.num_written += 1
            self.num_tokens += done.ready.prompt.num_tokens
            self.num_cut += done.ready.is_cut
            self.nbytes += done.nbytes
        speed = self.num_tokens / max(1e-9, time.monotonic() - self._began)
        self._progress.update(self._task, advance=1, speed=speed)

    def __enter__(self) -> SampleBar:
        self._began = time.monotonic()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
