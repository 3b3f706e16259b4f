"""The work of one HTTP request on the engine: its prompts, its admission, and its abort when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from hybridkv.engine import Engine, Prompt, Result, SamplingParams, Update
from hybridkv.errors import HybridKVError

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]


class TooBusyError(HybridKVError):
    """Too many requests are waiting; the client should retry later."""


class StoppingError(HybridKVError):
    """The server is stopping and cannot wait for the request any longer."""

    def __init__(self) -> None:
        super().__init__("the server is stopping, before the reply was complete: send the request again")


class ClientGone(Exception):  # noqa: N818 - no error of ours
    """The client has disconnected."""


class Ticket:
    """A request's place in the queue, from its arrival to its first token."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._is_waiting = True

    def called(self) -> None:
        """Called when the request no longer waits. Further calls do nothing."""
        if self._is_waiting:
            self._is_waiting = False
            self._admission.num_waiting -= 1


class Admission:
    """Admission control: limits the number of requests that wait for their first token."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self.num_refused = 0

    def enter(self) -> Ticket:
        if self.num_waiting >= self.max_waiting:
            self.num_refused += 1
            raise TooBusyError(f"{self.num_waiting} requests are waiting, which is the limit: try again in a moment")
        self.num_waiting += 1
        return Ticket(self)


class PromptBatch(NamedTuple):
    """The prompts of one HTTP request, and their parameters."""

    id: str
    """The id of the reply; the engine's requests are named after it."""
    prompts: Sequence[Prompt]
    params: SamplingParams
    cache_salt: str
    ticket: Ticket
    kv_transfer_params: Mapping[str, Any] | None = None

    async def updates(self, engine: Engine) -> AsyncGenerator[tuple[int, Update]]:
        """Yield updates of all prompts as they arrive, with the prompt's number. Leaving early aborts all prompts."""
        news: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()

        async def listen(number: int, prompt: Prompt) -> None:
            try:
                updates = engine.stream(
                    prompt,
                    self.params,
                    cache_salt=self.cache_salt,
                    kv_transfer_params=self.kv_transfer_params,
                    request_id=f"{self.id}-{number}",
                )
                async for update in updates:
                    news.put_nowait((number, update))
            except Exception as error:  # raised again below
                news.put_nowait((number, error))

        tasks = [asyncio.create_task(listen(number, prompt)) for number, prompt in enumerate(self.prompts)]
        missing = len(tasks)
        try:
            while missing:
                number, update = await news.get()
                self.ticket.called()
                if isinstance(update, Exception):
                    raise update
                missing -= update.result is not None
                yield number, update
        finally:
            self.ticket.called()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def results(self, engine: Engine) -> list[Result]:
        """All results, in the order of the prompts."""
        results: dict[int, Result] = {}
        async for number, update in self.updates(engine):
            if update.result is not None:
                results[number] = update.result
        return [results[number] for number in sorted(results)]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result; cancel it when the client disconnects. The body must have been read before.

    The server cancels this call itself when it stops and the request has used up its time to finish.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return await working
    except asyncio.CancelledError:
        raise StoppingError from None
    finally:
        for task in (working, watching):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
