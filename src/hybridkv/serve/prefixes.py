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
_NEW_S = 0.5
_FIRST_S = 5.0
"""Time to wait for a new snapshot, and for the first one."""
_POLL_S = 0.02


class Prefixes:
    """The prefixes of one engine's cache."""

    def __init__(self, engine: Engine, texts: TokenTexts, tokenizing: Tokenizing) -> None:
        self._engine = engine
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
        found = await run_in_threadpool(self._engine.prefix_tokens, _parse(key))
        if found is None:
            raise _unknown(key)
        ids, cut = list(found.token_ids), max(found.start, found.end - MAX_TEXT_TOKENS)
        before = ids[max(0, found.start - _BEFORE_TOKENS) : found.start]
        text, earlier = await self._tokenized(
            lambda: (self._texts.joined(ids[cut : found.end]), self._texts.joined(before)), is_long=False
        )
        is_cut = cut > found.start
        return PrefixText(key=key, start=found.start, end=found.end, text=text, is_cut=is_cut, before=earlier)

    async def pin(self, key: str, seconds: float) -> PinReply:
        tokens = await self._on_known(key, lambda name: self._engine.pin_prefix(name, seconds))
        return PinReply(key=key, tokens=tokens, expires_in_s=seconds)

    async def unpin(self, key: str) -> UnpinReply:
        if not await self._on_known(key, self._engine.unpin_prefix):
            raise NotFoundError(f"prefix {key} is not pinned: there is nothing to unpin")
        return UnpinReply(key=key, pinned=False)

    async def drop(self, key: str) -> DropReply:
        return DropReply(key=key, dropped_tokens=await self._on_known(key, self._engine.drop_prefix))

    async def _on_known(self, key: str, work: Callable[[bytes], T]) -> T:
        """Run `work` on a prefix that the cache has."""
        name = _parse(key)
        if await run_in_threadpool(self._engine.prefix_tokens, name) is None:
            raise _unknown(key)
        return await run_in_threadpool(work, name)

    async def _snapshot(self) -> dict[str, Any]:
        """A snapshot that is newer than this call, if the engine makes one in time."""
        clock, engine = asyncio.get_running_loop().time, self._engine
        engine.check_alive()
        engine.watch(frozenset(("prefixes",)))
        before, start = engine.live.prefixes, clock()
        while True:
            now = engine.live.prefixes
            is_new = now is not None and (before is None or now[0] != before[0])
            if now is not None and (is_new or clock() - start > _NEW_S):
                return now[1]
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
    return NotFoundError(f"the cache has no prefix {key}: it may have been evicted; see /v1/hybridkv/prefixes")
