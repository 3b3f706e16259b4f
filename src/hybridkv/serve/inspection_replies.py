"""Replies of the endpoints that show what became of requests and what the cache holds. They know no engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Source = Literal["memory", "store", "engine", "computed"]


class CallerReply(BaseModel):
    object: Literal["hybridkv.caller"] = "hybridkv.caller"
    is_operator: bool
    key_needed: bool
    key_ok: bool
    model: str
    version: str


class Span(BaseModel):
    start: int
    end: int
    source: Source


class CheckpointCard(BaseModel):
    position: int
    kind: str
    hits: int
    idle_s: float


class GroupCard(BaseModel):
    name: str
    kind: str
    supplies: int
    positions: list[int]
    num_positions: int
    runs: list[tuple[int, int]]


class EvictionCard(BaseModel):
    position: int
    seconds_ago: float
    requests_ago: int


class PlaceCard(BaseModel):
    offset: int
    chance: float


class LookupCard(BaseModel):
    position: int
    matched_tokens: int
    parted_at: int
    limit: int
    block_tokens: int
    missing: str | None
    checkpoint: CheckpointCard | None
    likely: list[PlaceCard]
    groups: list[GroupCard]
    evicted: list[EvictionCard]
    min_prefix: int


class StoreCard(BaseModel):
    outcome: str
    found: int
    loaded: int
    bytes: int
    seconds: float
    mode: str | None
    failure: str | None


class Reason(BaseModel):
    code: str
    position: int | None
    tokens: int
    text: str


class RecordEvent(BaseModel):
    at: float
    what: str
    start: int | None
    end: int | None
    seconds: float | None


class TransferRow(BaseModel):
    group: str
    first_layer: int
    last_layer: int
    bytes: int
    start: float
    end: float


class TransferLayer(BaseModel):
    layer: int
    start: float
    end: float
    waited: float


class TransferCard(BaseModel):
    rows: list[TransferRow]
    layers: list[TransferLayer]


class Times(BaseModel):
    queue_s: float
    ttft_s: float
    total_s: float
    per_token_s: float
    preemptions: int


class KeptBreakpoint(BaseModel):
    position: int
    kept_at: int
    outcome: str
    bytes: int


class PromptRecord(BaseModel):
    """What became of one prompt. docs/why.md explains each field."""

    request_id: str
    arrived_at: float
    adapter: str | None
    finish_reason: str
    prompt_tokens: int
    reply_tokens: int
    cached_tokens: int
    breakpoints: list[int]
    kept: list[KeptBreakpoint]
    warnings: list[str]
    spans: list[Span]
    lookup: LookupCard | None
    store: StoreCard | None
    why: list[Reason]
    events: list[RecordEvent]
    transfer: TransferCard | None
    metrics: Times


class _Request(BaseModel):
    object: Literal["hybridkv.request"] = "hybridkv.request"
    id: str
    request_id: str
    created: float
    path: str
    model: str
    cache_key: str | None
    outcome: str


class RecordReply(_Request):
    """One request for text."""

    prompts: list[PromptRecord | None]


class SourceTokens(BaseModel):
    memory: int
    store: int
    engine: int
    computed: int


class RecordSummary(_Request):
    """One request for text, in one line."""

    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int
    ttft_s: float | None
    missing: str | None
    why: str | None
    by_source: SourceTokens


class RecordList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RecordSummary]


class TokenTextsReply(BaseModel):
    start: int
    end: int
    total: int
    texts: list[str]


class NodeCheckpoint(CheckpointCard):
    worth: float | None


class PrefixNode(BaseModel):
    key: str
    parent: str | None
    start: int
    end: int
    leases: int
    pinned: bool
    children: int
    idle_s: float
    head: str
    checkpoints: list[NodeCheckpoint]


class PrefixList(BaseModel):
    time: float
    nodes: list[PrefixNode]
    num_nodes: int
    is_cut: bool


class PrefixText(BaseModel):
    key: str
    start: int
    end: int
    text: str
    is_cut: bool
    before: str


class PinReply(BaseModel):
    key: str
    tokens: int
    expires_in_s: float


class UnpinReply(BaseModel):
    key: str
    pinned: bool


class DropReply(BaseModel):
    key: str
    dropped_tokens: int
