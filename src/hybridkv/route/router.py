"""A request's way: to a prefill worker, then with what that one says to a decode worker; or to both at once."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import quote

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from hybridkv.route.bodies import Body, decode_body, needs_no_prefill_worker, parse_body
from hybridkv.route.forwarding import WorkerHeaders, headers_for_workers
from hybridkv.route.metrics import Metrics
from hybridkv.route.pool import Pool
from hybridkv.route.prefills import Asked, Early, PrefillRefused, Prefills
from hybridkv.route.relay import RelayedStream, is_event_stream, whole_reply
from hybridkv.route.upstream import Reply, ReplyTooLarge, Upstream
from hybridkv.serve.failures import UnknownModelError, failure
from hybridkv.serve.jobs import ClientGone, while_connected

LOG = logging.getLogger("hybridkv.route")
_MODELS = "/v1/models"
_LONGEST_NAME = 1024
"""More characters of a model's name are refused: they would make a path that workers refuse in other ways."""


class Router:
    """Prefill workers, decode workers, and connections to them."""

    def __init__(
        self, prefill: Pool, decode: Pool, *, prefill_timeout_s: float, is_early: bool, max_reply_bytes: int
    ) -> None:
        self.metrics = Metrics([prefill, decode])
        self._decode_pool = decode
        self._upstream = Upstream(max_reply_bytes)
        self._prefills = Prefills(prefill, self._upstream, self.metrics, prefill_timeout_s)
        self._is_early = is_early

    async def close(self) -> None:
        await self._upstream.close()

    async def answer(self, request: Request, path: str) -> Response:
        """A reply, or a stream that has not started yet. Both workers are left when the client disconnects.

        `path`: the endpoint of the workers. It is not read from the request, whose form the client chooses.
        """
        start = time.monotonic()
        try:
            body = parse_body(await request.body())
        except ClientDisconnect:
            raise ClientGone from None
        asked = Asked(request.state.request_id, path, body, headers_for_workers(request))
        return await while_connected(request.receive, self._route(asked, start))

    async def models(self, request: Request, name: str | None = None) -> Response:
        """The models that a decode worker serves, or one of them."""
        path = _MODELS if name is None else f"{_MODELS}/{_quoted(name)}"
        return await while_connected(request.receive, self._get(path, headers_for_workers(request)))

    async def is_healthy(self, request: Request) -> bool:
        """Whether a decode worker says that it is."""
        return await while_connected(request.receive, self._any_is_healthy(headers_for_workers(request)))

    async def _get(self, path: str, headers: WorkerHeaders) -> Response:
        """What the first decode worker answers that can be reached."""
        tried: list[Any] = []
        while (worker := self._decode_pool.choose_any(tried)) is not None:
            tried.append(worker)
            try:
                reply = await self._upstream.get(worker, path, headers)
            except httpx.TransportError:
                self._decode_pool.mark_down(worker)
                continue
            except ReplyTooLarge as error:
                return failure(502, str(error))
            return whole_reply(reply)
        return self._nobody()

    async def _any_is_healthy(self, headers: WorkerHeaders) -> bool:
        asked = [self._upstream.get(worker, "/health", headers) for worker in self._decode_pool.workers]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        return any(isinstance(reply, Reply) and reply.status == 200 for reply in replies)

    async def _route(self, asked: Asked, start: float) -> Response:
        if needs_no_prefill_worker(asked.body):
            self.metrics.direct.inc()
            return await self._decode(asked, None, start)
        worker = self._prefills.choose(asked)
        if worker is None:
            return await self._decode(asked, None, start)
        try:
            if self._is_early:
                early = await self._prefills.early(worker, asked, uuid.uuid4().hex)
                if early is not None:
                    return await self._decode_early(early, asked, start)
            return await self._decode(asked, await self._prefills.compute(worker, asked), start)
        except PrefillRefused as refused:
            return whole_reply(refused.reply)

    async def _decode_early(self, early: Early, asked: Asked, start: float) -> Response:
        """Ask both workers at once. If the prefill fails first, the decode worker is asked again without it."""
        prefill = asyncio.create_task(self._prefills.compute_early(early, asked))
        decode = asyncio.create_task(self._decode(asked, early.params, start))
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and not prefill.result():
                await _cancel(decode)
                return await self._decode(asked, None, start)
            reply = await decode
            if isinstance(reply, RelayedStream):
                reply.owned.push_async_callback(_cancel, prefill)
            else:
                await _cancel(prefill)
        except BaseException:
            await _cancel(prefill)
            await _cancel(decode)
            raise
        return reply

    async def _decode(self, asked: Asked, params: Body | None, start: float) -> Response:
        """Ask decode workers until one accepts the connection."""
        body = decode_body(asked.body, params)
        tried: list[Any] = []
        while (worker := self._decode_pool.choose_any(tried)) is not None:
            tried.append(worker)
            try:
                async with AsyncExitStack() as stack:
                    reply = await stack.enter_async_context(
                        self._upstream.stream(worker, asked.path, body, asked.headers)
                    )
                    if is_event_stream(reply):
                        return RelayedStream(reply, stack.pop_all(), lambda: self._note_first_byte(start))
                    whole = await self._upstream.read(worker, reply)
                    self._note_first_byte(start)
                    return whole_reply(whole)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                self._decode_pool.mark_down(worker)
                facts = {"request": asked.id, "worker": worker.url}
                LOG.warning("a decode worker cannot be reached", extra={"facts": facts})
            except httpx.TransportError:
                return failure(502, f"the decode worker {worker.url} has hung up before its reply: try again")
            except ReplyTooLarge as error:
                return failure(502, str(error))
        return self._nobody()

    def _note_first_byte(self, start: float) -> None:
        self.metrics.first_byte_s.observe(time.monotonic() - start)

    def _nobody(self) -> Response:
        count = len(self._decode_pool.workers)
        return failure(503, f"no decode worker can be reached, of {count}: check that they run; try again in a moment")


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end. A stream that it has opened meanwhile is closed."""
    task.cancel()
    for result in await asyncio.gather(task, return_exceptions=True):
        if isinstance(result, RelayedStream):
            await result.owned.aclose()


def _quoted(name: str) -> str:
    """A model's name as one segment of a path, so that it cannot lead to another endpoint of the worker."""
    if len(name) > _LONGEST_NAME or not {".", ".."}.isdisjoint(name.split("/")):
        raise UnknownModelError(f"no model {name[:200]!r} here: {_MODELS} lists those there are", "model")
    return quote(name, safe="")
