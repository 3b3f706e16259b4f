"""Computes the samples of `hybridkv extract`: prompts to the engine, rows to a writer, with bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridkv.cli.extract_input import Sample
from hybridkv.errors import InputError, ReplyError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from hybridkv.engine import Prompt

_SMALLEST_CHARGE = 1 << 20
"""A sample counts for at least this much, so that the number of samples in flight is bounded, too."""

Write = Callable[[int, "Tensor", "Tensor"], "Future[int]"]
"""Writes one sample: index, rows and token ids."""


class Taps(NamedTuple):
    """What the engine taps for one request, as a trial tells."""

    layers: tuple[int | str, ...]
    hidden_size: int
    item_bytes: int

    def bytes_per_token(self) -> int:
        return len(self.layers) * self.hidden_size * self.item_bytes


class Ready(NamedTuple):
    """A sample that is tokenized."""

    sample: Sample
    prompt: Prompt
    is_cut: bool

    @property
    def loss_mask(self) -> list[int]:
        """One number a token; all count if the input does not say."""
        mask = self.sample.loss_mask
        return [1] * self.prompt.num_tokens if mask is None else mask[: self.prompt.num_tokens]


class Done(NamedTuple):
    """What became of one sample. `error`: why it has no file."""

    ready: Ready
    nbytes: int
    error: str | None


class Extraction:
    """One engine that taps the same layers of every prompt."""

    def __init__(self, engine: Any, params: Any, max_tokens: int | None, adapter: str | None = None) -> None:
        self._engine = engine
        self._params = params
        self._max_tokens = max_tokens
        self._adapter = adapter

    def try_one(self) -> Taps:
        """Compute one token. Raises RequestError for layers that the model does not have."""
        [result] = self._engine.generate([[0]], self._params, adapter=self._adapter, progress=False)
        rows = rows_of(result)
        return Taps(tuple(result.hidden_layers), int(rows.shape[-1]), int(rows.element_size()))

    def tokenize(self, samples: Iterable[Sample]) -> Iterator[Ready]:
        """Tokenize and cut prompts, one at a time. Raises InputError that names the line."""
        for sample in samples:
            try:
                yield self._ready(sample)
            except RequestError as error:
                raise InputError(f"{sample.where}: {error}") from None

    def _ready(self, sample: Sample) -> Ready:
        engine = self._engine
        if sample.kind == "messages":
            prompt = engine.render_chat(sample.value, add_generation_prompt=False)
        else:
            prompt = engine.prepare(sample.value)
        is_cut = self._max_tokens is not None and prompt.num_tokens > self._max_tokens
        if is_cut:
            prompt = engine.prepare(prompt.token_ids[: self._max_tokens])
        engine.check(prompt, self._params)
        return Ready(sample, prompt, is_cut)

    def run(
        self,
        ready: Iterable[Ready],
        write: Write,
        on_done: Callable[[Done], None],
        *,
        bytes_per_token: int,
        in_flight_bytes: int,
    ) -> None:
        """Compute and write samples.

        A sample is in flight from its submission to the engine until its file is complete. `in_flight_bytes` bounds the
        rows of all samples in flight; one sample is always let through.
        """
        try:
            asyncio.run(self._run(ready, write, on_done, bytes_per_token, _Budget(in_flight_bytes)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(
        self,
        ready: Iterable[Ready],
        write: Write,
        on_done: Callable[[Done], None],
        bytes_per_token: int,
        budget: _Budget,
    ) -> None:
        async def complete(one: Ready, charge: int) -> None:
            try:
                on_done(await self._one(one, write))
            finally:
                budget.give(charge)

        async with asyncio.TaskGroup() as group:
            for one in ready:
                charge = max(_SMALLEST_CHARGE, one.prompt.num_tokens * bytes_per_token)
                await budget.take(charge)
                group.create_task(complete(one, charge))
                await asyncio.sleep(0)  # let finished samples go on

    async def _one(self, ready: Ready, write: Write) -> Done:
        import torch

        result: Any = None
        async for update in self._engine.stream(ready.prompt, self._params, adapter=self._adapter):
            result = update.result
        try:
            rows = rows_of(result)
            token_ids = torch.from_numpy(ready.prompt.ids.as_array().copy())
            nbytes = await _finished(asyncio.wrap_future(write(ready.sample.index, rows, token_ids)))
        except (InputError, ReplyError) as error:
            return Done(ready, 0, f"{ready.sample.where}: {error}")
        return Done(ready, nbytes, None)


def rows_of(result: Any) -> Tensor:
    """The hidden states of a result: [tokens, layers, hidden]. Raises ReplyError if the request failed."""
    [completion] = result.completions
    if completion.error is not None:
        raise ReplyError(completion.error)
    rows: Tensor = result.hidden_states
    return rows


async def _finished(writing: asyncio.Future[int]) -> int:
    """Wait for a write. After Ctrl-C, too: what was computed is not thrown away."""
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.gather(writing, return_exceptions=True)
        raise


class _Budget:
    """Bytes that may be in flight. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._is_less = asyncio.Event()

    async def take(self, nbytes: int) -> None:
        while self._used and self._used + nbytes > self._limit:
            self._is_less.clear()
            await self._is_less.wait()
        self._used += nbytes

    def give(self, nbytes: int) -> None:
        self._used -= nbytes
        self._is_less.set()
