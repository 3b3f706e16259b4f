"""The body of a request on its way: one that is too large, or comes too slowly, is refused before it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from hybridkv.units import format_bytes

_LEAST_BYTES_PER_S = 1024
"""Larger: clients with bad links are cut off. Smaller: a body can keep a connection for longer."""


class RequestBody:
    """Reads the body of one request. Nothing is buffered."""

    def __init__(
        self,
        headers: Headers,
        receive: Receive,
        *,
        max_bytes: int,
        timeout_s: float,
        is_answered: Callable[[], bool],
        on_slow: Callable[[], None],
    ) -> None:
        """`timeout_s`: the longest pause. `is_answered`: whether a reply has begun; then no time limit holds."""
        announced = headers.get("content-length", "")
        self._announced = int(announced) if announced.isdigit() and len(announced) < 20 else 0
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._is_answered = is_answered
        self._on_slow = on_slow
        self._begin = asyncio.get_running_loop().time()
        self._seen = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """The next message, as in ASGI. Raises `HTTPException` where the body is refused."""
        if self._announced > self._max_bytes:
            raise self._too_large()
        message = await (self._receive() if self._is_whole else self._receive_in_time())
        self._seen += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._seen > self._max_bytes:
            raise self._too_large()
        return message

    async def _receive_in_time(self) -> Message:
        end = min(
            asyncio.get_running_loop().time() + self._timeout_s,
            self._begin + self._timeout_s + self._seen / _LEAST_BYTES_PER_S,
        )
        try:
            async with asyncio.timeout_at(end):
                return await self._receive()
        except TimeoutError:
            if self._is_answered():
                return await self._receive()
        self._on_slow()
        raise HTTPException(
            408,
            f"the body comes too slowly, {self._seen} bytes so far: send it without pauses of {self._timeout_s:g} s, "
            f"with {_LEAST_BYTES_PER_S} bytes/s, or start the server with a larger --receive-timeout",
            {"Connection": "close"},
        )

    def _too_large(self) -> HTTPException:
        most = format_bytes(self._max_bytes)
        return HTTPException(
            413, f"the body has more than {most}: send less, or start the server with a larger --max-body"
        )
