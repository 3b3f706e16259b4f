"""The work of one HTTP request on the engine: its prompts, its admission, and its abort when the client disconnects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from hybridkv.engine import Engine, Prompt, Result, SamplingParams, Update
from hybridkv.errors import HybridKVError, RequestError

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]


class TooBusyError(HybridKVError):
    """Too many samples are waiting; the client should retry later."""


class StoppingError(HybridKVError):
    """The server is stopping and cannot wait for the request any longer."""

    def __init__(self) -> None:
        super().__init__("the server is stopping, before the reply was complete: send the request again")


class ClientGone(Exception):  # noqa: N818 - no error of ours
    """The client has disconnected."""


class Ticket:
    """The places of a request's samples among those that wait for their first token."""

    def __init__(self, admission: Admission, client: str, num_samples: int) -> None:
        self.client = client
        self._admission = admission
        self._num_waiting = num_samples

    def called(self, num_samples: int) -> None:
        """Called when some of the samples no longer wait."""
        self._num_waiting -= num_samples
        self._admission.leave(self.client, num_samples)

    def end(self) -> None:
        """Called when none of the samples waits any longer. Further calls do nothing."""
        self.called(self._num_waiting)


class Admission:
    """Admission control: limits the samples that wait for their first token.

    A client with at most an equal share of the limit is let in even if others fill it. So the samples of n clients are
    at most (1 + 1/2 + ... + 1/n) times the limit.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self._by_client: Counter[str] = Counter()
        """Waiting samples of each client that has any."""

    def enter(self, client: str, num_prompts: int, n: int) -> Ticket:
        """Places for n samples of each prompt."""
        asked = num_prompts * n
        if asked > self.max_waiting:
            prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts:,} prompts"
            raise RequestError(
                f"{prompts} with n {n} would be {asked:,} samples, and at most {self.max_waiting:,} may wait: ask for "
                "less in one request, or start the server with a larger --max-waiting",
                "n" if num_prompts <= n else "prompt",
            )
        own = self._by_client[client] + asked
        num_clients = len(self._by_client) + (client not in self._by_client)
        if self.num_waiting + asked > self.max_waiting and own > self.max_waiting // num_clients:
            raise TooBusyError(
                f"{self.num_waiting:,} samples are waiting, and at most {self.max_waiting:,} may: try again in a moment"
            )
        self.num_waiting += asked
        self._by_client[client] = own
        return Ticket(self, client, asked)

    def leave(self, client: str, num_samples: int) -> None:
        """Give back places of a client."""
        self.num_waiting -= num_samples
        self._by_client[client] -= num_samples
        if not self._by_client[client]:
            del self._by_client[client]


class PromptBatch(NamedTuple):
    """The prompts of one HTTP request, and their parameters."""

    id: str
    """The id of the reply; the engine's requests are named after it."""
    prompts: Sequence[Prompt]
    params: SamplingParams
    cache_salt: str
    ticket: Ticket
    kv_transfer_params: Mapping[str, Any] | None = None
    adapter: str | None = None
    conversation: Sequence[Mapping[str, Any]] | None = None
    """Messages to keep with the reply, for requests that go on with it."""

    async def updates(self, engine: Engine) -> AsyncGenerator[tuple[int, Update]]:
        """Yield updates of all prompts as they arrive, with the prompt's number. Leaving early aborts all prompts."""
        news: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()

        async def listen(number: int, prompt: Prompt) -> None:
            try:
                updates = engine.stream(
                    prompt,
                    self.params,
                    adapter=self.adapter,
                    cache_salt=self.cache_salt,
                    kv_transfer_params=self.kv_transfer_params,
                    client=self.ticket.client,
                    request_id=f"{self.id}-{number}",
                )
                async for update in updates:
                    news.put_nowait((number, update))
            except Exception as error:  # raised again below
                news.put_nowait((number, error))

        tasks = [asyncio.create_task(listen(number, prompt)) for number, prompt in enumerate(self.prompts)]
        missing, waiting = len(tasks), set(range(len(tasks)))
        try:
            while missing:
                number, update = await news.get()
                if isinstance(update, Exception):
                    raise update
                if number in waiting:
                    waiting.remove(number)
                    self.ticket.called(self.params.n)
                missing -= update.result is not None
                yield number, update
        finally:
            self.ticket.end()
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
