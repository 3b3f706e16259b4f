"""Keys of vLLM's requests: everything that changes the bytes of their KV, besides the model."""

from __future__ import annotations

from hashlib import shake_128
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.tokens import TOKEN_BYTES, adapter_key, lookup_key, pack_tokens
from hybridkv.errors import ConfigError
from hybridkv.models.checkpoint_digest import adapter_digest
from hybridkv.stream import BlockKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LEAST_MEDIA_TOKENS = 8
"""A digest of a media item takes the place of its tokens. Fewer tokens cannot hold 256 bits."""
_adapters: dict[tuple[object, ...], str] = {}
"""Digests of adapters, by path and stamp."""


class RequestTokens:
    """The tokens of one request, and the keys of its positions."""

    def __init__(self, request: Request, block_tokens: int) -> None:
        self._request = request
        self.keys = BlockKeys(lookup_key(request.cache_salt or "", _extra_keys(request)).root, block_tokens)
        self._packed = bytearray()

    def upto(self, num_tokens: int) -> bytes:
        """The first `num_tokens` tokens. Placeholders of media are replaced by digests of what they stand for."""
        known = len(self._packed) // TOKEN_BYTES
        if known < num_tokens:
            more = pack_tokens(list(self._request.all_token_ids[known:num_tokens]))
            self._packed += _with_media(more, known, self._request)
        return bytes(self._packed[: num_tokens * TOKEN_BYTES])

    def at(self, ends: list[int]) -> dict[int, bytes]:
        return self.keys.at(ends, self.upto(max(ends)))


def is_keyed(request: Request) -> bool:
    """Whether tokens and digests say all about a request. Embeddings have no tokens, and sessions change theirs."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.resumable
        and request.pooling_params is None
        and all(feature.mm_position.length >= _LEAST_MEDIA_TOKENS for feature in request.mm_features)
    )


def _extra_keys(request: Request) -> list[str]:
    lora = request.lora_request
    if lora is None:
        return []
    key = (lora.lora_path, _stamp(Path(lora.lora_path)))
    if key not in _adapters:
        _adapters[key] = _adapter_digest(lora.lora_path)
    return [adapter_key(lora.lora_name, _adapters[key])]


def _stamp(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when an adapter is replaced in its place: names, times and sizes of its files."""
    try:
        found = [(file.name, file.stat()) for file in sorted(directory.iterdir()) if file.is_file()]
    except OSError:
        return ()
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)


def _adapter_digest(path: str) -> str:
    """A digest of the adapter's files: another adapter may get the same name."""
    try:
        return adapter_digest(Path(path))
    except (ConfigError, OSError):
        return path  # of the hub: its name with the revision is all there is


def _with_media(packed: bytes, first: int, request: Request) -> bytes:
    """Tokens from number `first` on, with the digest of each media item in the place of its placeholders."""
    tokens = np.frombuffer(packed, "<i4").copy()
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        digest = np.frombuffer(shake_128(feature.identifier.encode()).digest(length * TOKEN_BYTES), "<i4")
        start, end = max(offset, first), min(offset + length, first + len(tokens))
        if start < end:
            tokens[start - first : end - first] = digest[start - offset : end - offset]
    return tokens.tobytes()
