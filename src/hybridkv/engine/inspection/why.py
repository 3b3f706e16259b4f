"""Sentences that say why not more of a prompt was cached, and what would have made it better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.cache import BreakpointAccount, Evicted, Explanation, Outcome
from hybridkv.cache.index.resume import Missing

if TYPE_CHECKING:
    from hybridkv.engine.inspection.record import StoreAccount

_THINGS = {Missing.STATE: "state", Missing.WINDOW: "window", Missing.TAP: "hidden states"}


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why a request computed tokens that might have been cached."""

    code: str
    position: int | None
    """The position that it is about."""
    tokens: int
    """Tokens that it cost; 0 if that cannot be told."""
    text: str


def reasons(
    lookup: Explanation | None,
    cached_tokens: int,
    evicted: Evicted | None,
    store: StoreAccount | None,
    preemptions: int,
    *,
    adapter: str | None = None,
) -> list[Reason]:
    """The reasons, the main one first. `evicted`: what the request found out while it computed. `adapter`: its name."""
    found: list[Reason] = []
    if lookup is not None:
        found += _about_memory(lookup, cached_tokens, evicted, adapter, has_store=store is not None)
        if store is not None and cached_tokens < lookup.last_position:
            found += _about_store(store, lookup)
    if preemptions:
        times = "once" if preemptions == 1 else f"{preemptions} times"
        text = f"The request was preempted {times} for want of memory, and computed some tokens again."
        found.append(Reason("preempted", None, 0, text))
    return found


def breakpoint_warnings(accounts: Sequence[BreakpointAccount]) -> Iterator[str]:
    """Sentences about breakpoints at which nothing was kept, though their tokens were computed."""
    lost = [account for account in accounts if account.outcome is Outcome.NO_ROOM]
    if lost:
        named, places = f"{len(lost)} of {len(accounts)} breakpoints", ", ".join(f"{one.kept_at:,}" for one in lost)
        yield f"Memory had no room for {named} (at token {places}): name fewer, or give the cache more memory."


def _about_memory(
    lookup: Explanation, cached_tokens: int, evicted: Evicted | None, adapter: str | None, *, has_store: bool
) -> Iterator[Reason]:
    if lookup.prompt_tokens <= lookup.block_tokens:
        yield _too_short(lookup)
        return
    if cached_tokens >= lookup.last_position:
        return
    missing, matched = Missing(lookup.missing), lookup.matched_tokens
    if missing in _THINGS and cached_tokens < matched:
        yield _not_resumable(lookup, missing, cached_tokens, has_store)
    reach = max(matched, cached_tokens)
    if reach >= lookup.last_position:
        return
    if evicted is not None and evicted.position > reach:
        yield _gone(evicted, evicted.position - reach, has_store)
    else:
        yield _new(lookup, reach, adapter)


def _too_short(lookup: Explanation) -> Reason:
    size = lookup.block_tokens
    text = (
        f"The prompt has {_count(lookup.prompt_tokens)}, and the shortest that can be shared has {size + 1}: "
        f"one block of {size}, and one more to compute."
    )
    return Reason("too_short", None, 0, text)


def _not_resumable(lookup: Explanation, missing: Missing, cached: int, has_store: bool) -> Reason:
    """KV matches further than anything that a request can resume from."""
    matched, thing = lookup.matched_tokens, _THINGS[missing]
    lost = matched - cached
    begin = f"Keys and values match up to token {matched:,}, but "
    gone = lookup.evicted
    if gone is not None and gone.position > cached:
        text = (
            f"{begin}the {thing} at token {gone.position:,} {_was_evicted(gone)}: {_count(lost)} were computed again. "
            f"{_remedy(has_store)}"
        )
        return Reason(f"{thing.replace(' ', '_')}_evicted", gone.position, gone.position - cached, text)
    since = f"between tokens {cached:,} and {matched:,}" if cached else f"before token {matched:,}"
    kept = "were kept" if missing is Missing.TAP else "was kept"
    text = f"{begin}no {thing} {kept} {since}: {_count(lost)} were computed again. "
    if missing is Missing.STATE:
        text += (
            f"One is kept at token {matched:,} now. A breakpoint of the earlier request in the block that begins there "
            f"would have kept it in time: ends of messages are breakpoints, and the field `breakpoints` adds others."
        )
    elif missing is Missing.TAP:
        text += "The requests before this one did not ask for these layers."
    else:
        text += "A window is kept where a prompt or a reply ends, and at breakpoints."
    return Reason(str(missing), matched, lost, text)


def _gone(evicted: Evicted, lost: int, has_store: bool) -> Reason:
    text = (
        f"The prompt was cached up to token {evicted.position:,}, and {_was_evicted(evicted)}: {_count(lost)} were "
        f"computed again. {_remedy(has_store)}"
    )
    return Reason("evicted", evicted.position, lost, text)


def _new(lookup: Explanation, reach: int, adapter: str | None) -> Reason:
    """Nothing goes on the same after `reach`, in memory or in a store."""
    size, parted, rest = lookup.block_tokens, max(lookup.parted_at, reach), lookup.prompt_tokens - reach
    kin = "" if adapter is None else f" with the adapter {adapter!r}"
    if reach:
        text = f"The rest is new: no cached prompt{kin} goes on the same from token {parted:,} on."
        return Reason("new", parted, rest, text)
    if parted:
        text = (
            f"The nearest cached prompt{kin} differs from token {parted:,} on. A shared prefix has at least {size} "
            f"tokens, and begins with the first token."
        )
        return Reason("parted_early", parted, rest, text)
    if adapter is not None:
        kin += " and the same cache_salt"
    elif lookup.is_apart:
        kin = " with the same cache_salt"
    text = f"No cached prompt{kin} begins with the same token. A shared prefix has at least {size} tokens."
    return Reason("never_seen", 0, rest, text)


def _about_store(store: StoreAccount, lookup: Explanation) -> Iterator[Reason]:
    position = lookup.position
    if store.outcome == "failed":
        text = f"The store had the prompt up to token {store.found:,}, but loading it failed: {store.failure}."
        yield Reason("store_failed", store.found, max(0, store.found - position), text)
    elif store.outcome == "lookup failed":
        yield Reason("store_lookup_failed", None, 0, "The store could not be asked: its lookup failed.")
    elif store.outcome == "slow":
        yield Reason("store_slow", None, 0, "The store did not answer in time whether it has more of the prompt.")
    elif store.outcome == "no room":
        text = f"The store had the prompt up to token {store.found:,}, but there was no room to load it."
        yield Reason("store_no_room", store.found, max(0, store.found - position), text)
    elif store.outcome == "nothing more":
        text = "The store has no more of the prompt either." if position else "The store has nothing of the prompt."
        yield Reason("store_has_no_more", None, 0, text)


def _was_evicted(evicted: Evicted) -> str:
    requests = "request" if evicted.requests_ago == 1 else "requests"
    return f"was evicted {_ago(evicted.seconds_ago)} ({evicted.requests_ago:,} {requests} ago)"


def _remedy(has_store: bool) -> str:
    return "More memory would have kept it." if has_store else "More memory, or a store, would have kept it."


def _count(tokens: int) -> str:
    return f"{tokens:,} token" if tokens == 1 else f"{tokens:,} tokens"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
