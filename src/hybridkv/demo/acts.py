"""The acts of `hybridkv demo`, on real engines. Each returns a record; the command draws it.

The engine's package is imported by `start`, which the command supplies: this module imports no torch by itself.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from hybridkv.demo.files import Question
from hybridkv.demo.records import Answer, Comparison, Corruption, Restart
from hybridkv.errors import DiskError, InputError, ReplyError, is_disk_failure
from hybridkv.store import ObjectName, inspect_store
from hybridkv.store.file.folder import Folder

if TYPE_CHECKING:
    from hybridkv.engine import Engine, Prompt, Result

Start = Callable[[str], "Engine"]
"""Starts an engine on the store with this URL."""

_REPLY_TOKENS = 48
_FLIPPED_BYTES = 8


class Demo:
    """One document, questions about it, and engines that share a store in a temporary directory.

    Use it in a `with` block: it closes the engine and removes the directory.
    """

    def __init__(self, start: Start, document: str, questions: Sequence[Question]) -> None:
        self._start = start
        self._document = document
        self._questions = questions
        self._folder = _temporary_folder()
        self._url = f"file://{quote(self._folder.name)}"
        self._engine: Engine | None = None
        self._stored: set[ObjectName] = set()
        """Objects of the document, and not those of questions asked without the cache."""

    # --- acts ---------------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Start an engine, and close the one before it. Its memory is empty; the store has what was written to it."""
        self._close()
        self._engine = self._start(f"{self._url}?size=1GiB")
        self._reply("Hello", max_tokens=1)  # the first step of an engine is slow; too short to be stored
        return self._engine

    def read(self) -> Answer:
        """The first question: the whole document is computed."""
        answer = self._ask(self._questions[0])
        self._running.flush_store()
        with inspect_store(self._url) as store:
            self._stored = {one.name for one in store.objects()}
        return answer

    def ask(self) -> Iterator[Comparison]:
        """All other questions, each with the cache and without."""
        for number, question in enumerate(self._questions[1:]):
            cached = self._ask(question)
            yield Comparison(cached, self._ask(question, salt=f"without the cache {number}"))

    def restart(self) -> Restart:
        """A new engine answers the second question from what the first engine has stored."""
        self.start()
        answer = self._ask(self._questions[1])
        counted = self._running.stats().stream
        assert counted is not None
        return Restart(answer, counted.loaded_tokens, counted.loaded_bytes, counted.loads["layerwise"])

    def corrupt(self) -> Corruption:
        """The same after some bytes of a stored object were flipped, as a failing disk would."""
        self._close()
        name = self._damage()
        self.start()
        with _heard("hybridkv.store") as log:
            answer = self._ask(self._questions[1])
        counted = self._running.stats().store
        assert counted is not None
        return Corruption(answer, f"{name.group}/{name.key}", _FLIPPED_BYTES, counted.corrupt, tuple(log))

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Engine:
        assert self._engine is not None, "start() comes first"
        return self._engine

    def _ask(self, question: Question, salt: str = "") -> Answer:
        """The document is the system message, so that all questions have the same beginning."""
        system = {"role": "system", "content": self._document}
        prompt = self._running.render_chat([system, {"role": "user", "content": question.question}])
        result = self._reply(prompt, _REPLY_TOKENS, salt)
        text, is_right = result.text.strip(), question.expected in result.text
        return Answer(*question, text, prompt.num_tokens, result.cached_tokens, result.metrics.ttft_s, is_right)

    def _reply(self, prompt: str | Prompt, max_tokens: int, salt: str = "") -> Result:
        from hybridkv.engine import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        [result] = self._running.generate(prompt, params, cache_salt=salt, progress=False)
        if (error := result.completions[0].error) is not None:
            raise ReplyError(error)
        return result

    def _damage(self) -> ObjectName:
        """Flip bytes of the object with the KV of the first 256 tokens: every load of a longer document reads it."""
        with inspect_store(self._url) as store:
            found = [one for one in store.objects(group="full", headers=True) if one.name in self._stored]
            name = min(found, key=lambda one: one.position or 0).name
            with store.open(name) as reader:
                last_row = reader.header.rows[-1]
        _flip_bytes(Path(Folder(Path(self._folder.name)).path(name)), last_row.offset)
        return name

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Demo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._close()
        finally:
            self._folder.cleanup()


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="hybridkv-demo-")
    except OSError as error:
        kind = DiskError if is_disk_failure(error) else InputError
        reason = error.strerror or str(error)
        raise kind(f"no temporary directory for the demo's store: {reason}; name another place in $TMPDIR") from error


def _flip_bytes(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        flipped = bytes(byte ^ 0xFF for byte in file.read(_FLIPPED_BYTES))
        file.seek(offset)
        file.write(flipped)


@contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    """Collect what a logger says, instead of letting it write into the middle of a drawing."""
    logger, handler = logging.getLogger(name), BufferingHandler(capacity=1000)
    said: list[str] = []
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        said += [record.getMessage() for record in handler.buffer]
