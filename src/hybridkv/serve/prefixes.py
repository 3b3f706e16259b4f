"""Cached prefixes for the operator: their list, their texts, pins, and dropping them. It knows no HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from hybridkv.engine import Engine, EngineError
from hybridkv.errors import RequestError
from hybridkv.serve.failures import NotFoundError
from hybridkv.serve.inspection_replies import DropReply, PinReply, PrefixText, UnpinReply
from hybridkv.serve.token_texts import TokenTexts
from hybridkv.serve.tokenizing import LONG_BYTES, Tokenizing

T = TypeVar("T")
MAX_TEXT_TOKENS = 4096
_BEFORE_TOKENS = 256
_MAX_HEADS = 16384
"""Most texts of prefixes' beginnings that are kept."""
_HEX = re.compile("(?:[0-9a-f]{2}){1,64}")
_TOPIC = "prefixes"
_NEW_S = 0.2
"""Time to wait for a newer snapshot. There is none if nothing has changed."""
_FIRST_S = 5.0
_POLL_S = 0.02


class Prefixes:
    """The prefixes of one engine's cache."""

    def __init__(self, engine: Engine, texts: TokenTexts, tokenizing: Tokenizing) -> None:
        self._engine = engine
        self._inspection = engine.inspection
        self._texts = texts
        self._tokenizing = tokenizing
        self._heads: dict[tuple[int, ...], str] = {}

    async def all(self) -> str:
        """All prefixes as JSON."""
        return await self.serialize(await self._snapshot())

    async def serialize(self, snapshot: dict[str, Any]) -> str:
        """The JSON of a snapshot, with texts in place of token ids. Made on the thread for long texts."""
        return await self._tokenized(lambda: self._to_json(snapshot), is_long=True)

    async def text(self, key: str) -> PrefixText:
        """The text of a prefix's own tokens, and of some before it."""
        found = await run_in_threadpool(self._inspection.prefix_tokens, _parse(key))
        if found is None:
            raise _unknown(key)
        ids, start, end = found.token_ids, found.start, len(found.token_ids)
        cut = max(start, end - MAX_TEXT_TOKENS)
        before = ids[max(0, start - _BEFORE_TOKENS) : start]
        text, earlier = await self._tokenized(
            lambda: (self._texts.joined(ids[cut:]), self._texts.joined(before)), is_long=False
        )
        return PrefixText(key=key, start=start, end=end, text=text, is_cut=cut > start, before=earlier)

    async def pin(self, key: str, seconds: float) -> PinReply:
        name = _parse(key)
        tokens = await run_in_threadpool(self._inspection.pin_prefix, name, seconds)
        if not tokens and await run_in_threadpool(self._inspection.prefix_tokens, name) is None:
            raise _unknown(key)
        if not tokens:
            raise RequestError(f"prefix {key}: no request can resume from it, so there is nothing to pin", "key")
        return PinReply(key=key, tokens=tokens, expires_in_s=seconds)

    async def unpin(self, key: str) -> UnpinReply:
        if not await run_in_threadpool(self._inspection.unpin_prefix, _parse(key)):
            raise NotFoundError(f"prefix {key} is not pinned: there is nothing to unpin", "key")
        return UnpinReply(key=key, pinned=False)

    async def drop(self, key: str) -> DropReply:
        tokens = await run_in_threadpool(self._inspection.drop_prefix, _parse(key))
        if not tokens:
            raise _unknown(key)
        return DropReply(key=key, dropped_tokens=tokens)

    async def _snapshot(self) -> dict[str, Any]:
        """A snapshot that is newer than this call, if the engine makes one in time."""
        clock = asyncio.get_running_loop().time
        self._engine.check_alive()
        before, start = self._inspection.latest(_TOPIC), clock()
        self._inspection.watch([_TOPIC])
        while True:
            now = self._inspection.latest(_TOPIC)
            if now is not None and (now is not before or clock() - start > _NEW_S):
                return now.data
            if clock() - start > _FIRST_S:
                raise EngineError(f"the engine has shown no prefixes within {_FIRST_S:g} s: try again")
            await asyncio.sleep(_POLL_S)

    def _to_json(self, snapshot: dict[str, Any]) -> str:
        nodes = []
        for node in snapshot["nodes"]:
            shown = {**node, "head": self._head(node["head_ids"])}
            del shown["head_ids"]
            nodes.append(shown)
        return json.dumps({**snapshot, "nodes": nodes})

    def _head(self, token_ids: list[int]) -> str:
        ids = tuple(token_ids)
        text = self._heads.get(ids)
        if text is None:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()
            text = self._heads[ids] = self._texts.joined(ids)
        return text

    async def _tokenized(self, work: Callable[[], T], *, is_long: bool) -> T:
        return await self._tokenizing.run(lambda engine: work(), LONG_BYTES if is_long else 0)


def _parse(key: str) -> bytes:
    if _HEX.fullmatch(key) is None:
        raise RequestError(f"prefix {key[:100]!r} is no key: take one from /v1/hybridkv/prefixes", "key")
    return bytes.fromhex(key)


def _unknown(key: str) -> NotFoundError:
    return NotFoundError(f"the cache has no prefix {key}: it may have been evicted; see /v1/hybridkv/prefixes", "key")
