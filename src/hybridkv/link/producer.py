"""The producing half of a link: prompts that were computed here and wait for their consumer.

    begin ──► offer ──► claim ──► push ──► released         the consumer asks after the prompt was computed
    claim ──► begin ──► steps push layer by layer ──► finish     it asks before: rows leave while later layers compute

The engine pins the pages of an offer. A lease bounds the time: it ends unless the consumer renews it, and `on_release`
tells the engine to unpin. Calls of consumers come on the control server's threads.
"""

from __future__ import annotations

import logging
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridkv.link.agent import Agent
from hybridkv.link.arena import Arena, Place
from hybridkv.link.errors import LinkError, LinkMismatch, Refused
from hybridkv.link.geometry import Geometry
from hybridkv.link.messages import FirstToken, pages_from_json
from hybridkv.link.parcels import PARCEL_BYTES
from hybridkv.link.push import Push, Pusher, Target
from hybridkv.link.runs import Cutter, PageTables
from hybridkv.link.stats import LinkStats

LOG = logging.getLogger("hybridkv.link")
VERSION = 1
"""Version of what engines tell each other."""
_MAX_TARGETS = 256
"""Consumers that are remembered. The oldest is forgotten: it connects again when it is refused."""
_MAX_EARLY = 4096
"""Claims that may wait for their prompt."""
_MAX_CANCELLED = 1 << 16
"""Cancelled claims that are remembered: a call that was sent earlier may be executed later."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What must be the same on both sides, so that the consumer may go on where the producer stopped."""

    num_tokens: int
    digest: str
    """Digest of the tokens and the lookup key."""
    sampling: str
    """Digest of the parameters that the first token depends on."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The pages of a consumer that wait for a prompt."""

    id: str
    target: Target
    prompt: Prompt
    start: int
    pages: PageTables


@dataclass(slots=True)
class Outbound:
    """One prompt and its consumer, as far as they are known."""

    request_id: str
    expires_at: float
    prompt: Prompt | None = None
    """None: the request has not come yet."""
    claim: Claim | None = None
    pages: PageTables | None = None
    """The pinned pages of the whole prompt, once it was computed."""
    first: Sequence[FirstToken] = ()
    push: Push | None = None

    @property
    def is_ready(self) -> bool:
        return self.claim is not None and self.pages is not None


class Producer:
    """All prompts of one engine that consumers may claim. Thread-safe."""

    def __init__(
        self,
        engine_id: str,
        agent: Agent,
        arena: Arena,
        geometry: Geometry,
        stats: LinkStats,
        *,
        lease_s: float,
        checksums: bool = True,
        parcel_bytes: int = PARCEL_BYTES,
        on_release: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_release`: called on any thread when the pages of a request are not needed any more."""
        self.lease_s = lease_s
        self._engine_id = engine_id
        self._agent = agent
        self._arena = arena
        self._geometry = geometry
        self._stats = stats
        self._checksums = checksums
        self._parcel_bytes = parcel_bytes
        self._on_release = on_release
        self._clock = clock
        self._lock = threading.RLock()
        self._targets: dict[str, Target] = {}
        """Consumers, by engine id."""
        self._dead: set[str] = set()
        """Names of consumers that could not be reached and are forgotten once no push to them is left."""
        self._outbound: dict[str, Outbound] = {}
        self._cancelled: dict[str, None] = {}
        """Claims whose consumers have given up, the oldest first."""
        self._is_closed = False
        self._pusher = Pusher(self._push_over)
        self._calls: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "connect": self._connect,
            "claim": self._claim,
            "renew": self._renew,
            "cancel": self._cancel,
            "release": self._release,
        }

    # --- calls of consumers -------------------------------------------------------------------------------------------

    def handle(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a call of an authenticated consumer. Raises Refused."""
        call = self._calls.get(method)
        if call is None:
            raise Refused(f"no call {method!r}: the versions of both engines differ", "protocol")
        try:
            return call(params)
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"{method}: parameters that are not of this protocol: {error!r}", "protocol") from error

    def _connect(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Exchange geometry and NIXL metadata. Refuses consumers that this engine cannot feed."""
        if params["version"] != VERSION:
            raise Refused(f"link version {params['version']} against {VERSION} here: use one version", "mismatch")
        try:
            cutter = Cutter(self._geometry, Geometry.from_json(params["geometry"]))
        except LinkMismatch as error:
            self._stats.count_failure("mismatch")
            raise Refused(str(error), "mismatch") from error
        engine_id = str(params["engine_id"])
        with self._lock:
            if self._pusher.is_pushing_to(engine_id):
                raise Refused("writes to this consumer have not ended yet: compute this prompt", "busy")
            self._forget(engine_id)
            idle = [one for one in self._targets if not self._pusher.is_pushing_to(one)]
            for one in idle[: max(0, len(self._targets) + 1 - _MAX_TARGETS)]:
                self._forget(one)
            name = self._agent.add(b64decode(params["metadata"]))
            self._targets[engine_id] = Target(name, _place_of(params["place"]), cutter)
        return {
            "version": VERSION,
            "engine_id": self._engine_id,
            "geometry": self._geometry.to_json(),
            "metadata": b64encode(self._agent.metadata).decode(),
            "lease_s": self.lease_s,
        }

    def _forget(self, engine_id: str) -> None:
        target = self._targets.pop(engine_id, None)
        if target is None:
            return
        try:
            self._agent.remove(target.name)
        except Exception as error:  # NIXL has forgotten it already
            LOG.debug("removing %s: %r", target.name, error)

    def _claim(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A consumer has pages for a prompt. The push starts now, or when the prompt is there (`early`)."""
        with self._lock:
            target = self._targets.get(str(params["engine_id"]))
            if target is None or target.name in self._dead:
                raise Refused("this consumer is not connected: connect, then claim again", "unconnected")
            prompt = Prompt(int(params["num_tokens"]), str(params["digest"]), str(params["sampling"]))
            pages = pages_from_json(params["pages"])
            claim = Claim(str(params["claim"]), target, prompt, int(params["start"]), pages)
            if claim.id in self._cancelled:
                self._release(params)
                raise Refused("this claim was cancelled before it came", "cancelled")
            if self._is_closed:
                raise Refused("this engine is being closed: compute this prompt", "closed")
            outbound = self._claimed(str(params["request_id"]), is_early=bool(params["early"]))
            if outbound.prompt is not None:
                _check_same(outbound.prompt, prompt)
            outbound.claim = claim
            outbound.expires_at = self._clock() + self.lease_s
            self._start(outbound)
        return {}

    def _claimed(self, request_id: str, *, is_early: bool) -> Outbound:
        outbound = self._outbound.get(request_id)
        if outbound is None and is_early:
            if len(self._outbound) >= _MAX_EARLY:
                raise Refused("too many prompts wait here: compute this one", "busy")
            outbound = self._outbound[request_id] = Outbound(request_id, 0.0)
        if outbound is None:
            raise Refused(f"no prompt {request_id!r} waits here: its lease has ended, or it was claimed", "unknown")
        if outbound.claim is not None:
            raise Refused(f"prompt {request_id!r} is claimed already", "unknown")
        return outbound

    def _renew(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Consumers wait for these requests, and for the writes of these claims."""
        now = self._clock()
        with self._lock:
            known = [self._outbound[one] for one in params["request_ids"] if one in self._outbound]
            for outbound in known:
                outbound.expires_at = now + self.lease_s
        return {"known": [outbound.request_id for outbound in known]}

    def _cancel(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A consumer gives up. `settled`: no write of this claim is in progress, or will be."""
        with self._lock:
            found = [
                one for one in self._outbound.values() if one.claim is not None and one.claim.id == params["claim"]
            ]
            for outbound in found:
                self._drop(outbound, "the consumer gave up")
            claim = str(params["claim"])
            self._cancelled[claim] = None
            if len(self._cancelled) > _MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]
            push = self._pusher.find(claim)
        return {"settled": push is None, "engine_id": self._engine_id}

    def _release(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A consumer does not need a prompt that it has not claimed."""
        with self._lock:
            outbound = self._outbound.get(str(params["request_id"]))
            if outbound is not None and outbound.claim is None:
                self._drop(outbound, "not needed")
        return {}

    # --- the engine ---------------------------------------------------------------------------------------------------

    def begin(self, request_id: str, prompt: Prompt) -> Outbound:
        """The engine is about to compute a prompt for another engine. Its consumer may have claimed it already."""
        with self._lock:
            outbound = self._outbound.setdefault(request_id, Outbound(request_id, 0.0))
            if outbound.prompt is not None:
                raise LinkError(f"transfer id {request_id!r} is in use: choose another")
            outbound.prompt = prompt
            outbound.expires_at = float("inf")  # the engine ends it
            if outbound.claim is not None:
                try:
                    _check_same(outbound.claim.prompt, prompt)
                except Refused as error:
                    claim, outbound.claim = outbound.claim, None
                    self._refuse_late(claim, str(error))
        return outbound

    def start_early(self, outbound: Outbound) -> Push | None:
        """The push of a prompt that is being computed, if it is claimed."""
        with self._lock:
            if self._outbound.get(outbound.request_id) is not outbound:  # the consumer may have reused its pages
                return None
            if outbound.push is None and outbound.claim is not None and outbound.pages is None:
                outbound.push = self._new_push(outbound.claim)
                self._pusher.start(outbound.push)
            return outbound.push

    def offer(self, outbound: Outbound, pages: PageTables, first: Sequence[FirstToken]) -> None:
        """The prompt is computed, and its pages are pinned until `on_release`."""
        with self._lock:
            self._stats.offers += 1
            if self._outbound.get(outbound.request_id) is not outbound:  # its consumer gave up or died meanwhile
                self._on_release(outbound.request_id)
                return
            outbound.pages, outbound.first = pages, first
            outbound.expires_at = self._clock() + self.lease_s
            if outbound.push is not None:  # all its steps were pushed
                outbound.push.finish(first)
            else:
                self._start(outbound)

    def withdraw(self, outbound: Outbound, reason: str) -> None:
        """The prompt will not be computed, or its pages are wrong."""
        with self._lock:
            if self._outbound.get(outbound.request_id) is outbound:
                self._drop(outbound, reason)

    def withdraw_oldest(self, kind: str) -> bool:
        """Withdraw the offer without a claim whose lease ends first: its pages are needed. False: there is none.

        Prompts that are claimed stay, since their pages are being sent. `kind`: kind of failure that is counted.
        """
        with self._lock:
            offers = [one for one in self._outbound.values() if one.pages is not None and one.claim is None]
            if not offers:
                return False
            self._stats.count_failure(kind)
            self._drop(min(offers, key=lambda one: one.expires_at), "its pages were needed for another request")
        return True

    @property
    def num_outbound(self) -> int:
        return len(self._outbound)

    def expire(self) -> None:
        """End leases that were not renewed in time. Called now and then on a thread of the link."""
        now = self._clock()
        with self._lock:
            for outbound in [one for one in self._outbound.values() if one.expires_at <= now]:
                self._stats.count_failure("lease" if outbound.claim is None else "consumer")
                self._drop(outbound, f"the lease of {self.lease_s:g} s was not renewed")

    def close(self, timeout_s: float = 2.0) -> bool:
        """False: writes are still in progress."""
        with self._lock:
            self._is_closed = True
            for outbound in list(self._outbound.values()):
                self._drop(outbound, "the producer was closed")
        self._pusher.close(timeout_s)
        return not self._pusher.num_active

    # --- pushes -------------------------------------------------------------------------------------------------------

    def _start(self, outbound: Outbound) -> None:
        """Push a prompt that is computed and claimed."""
        if not outbound.is_ready or outbound.push is not None:
            return
        claim, pages = outbound.claim, outbound.pages
        assert claim is not None
        assert pages is not None
        push = self._new_push(claim)
        push.add(pages, claim.pages, claim.start, claim.prompt.num_tokens)
        push.finish(outbound.first)
        outbound.push = push
        self._pusher.start(push)

    def _new_push(self, claim: Claim) -> Push:
        return Push(
            self._agent,
            self._arena,
            claim.target,
            claim.id,
            checksums=self._checksums,
            parcel_bytes=self._parcel_bytes,
            wake=self._pusher.wake,
        )

    def _refuse_late(self, claim: Claim, reason: str) -> None:
        """Tell a consumer whose claim was accepted that nothing will come."""
        push = self._new_push(claim)
        push.fail(reason)
        self._pusher.start(push)

    def _drop(self, outbound: Outbound, reason: str) -> None:
        del self._outbound[outbound.request_id]
        if outbound.push is not None:
            outbound.push.fail(reason)
        elif outbound.claim is not None:
            self._refuse_late(outbound.claim, reason)
        self._on_release(outbound.request_id)

    def _push_over(self, push: Push) -> None:
        with self._lock:
            self._stats.sent(push)
            if push.failure is not None:
                LOG.warning("a prompt was not sent to %s: %s", push.target.name, push.failure)
            found = [one for one in self._outbound.values() if one.push is push]
            for outbound in found:
                del self._outbound[outbound.request_id]
                self._on_release(outbound.request_id)
            name = push.target.name
            if push.is_dead:
                self._dead.add(name)
            if name in self._dead and not self._pusher.is_pushing_to(name):  # NIXL still needs it for their writes
                self._dead.remove(name)
                for engine_id in [key for key, target in self._targets.items() if target.name == name]:
                    self._forget(engine_id)


def _place_of(value: Sequence[Any]) -> Place:
    address, nbytes, kind, device = value
    return Place(int(address), int(nbytes), str(kind), int(device))


def _check_same(one: Prompt, other: Prompt) -> None:
    if (one.num_tokens, one.digest) != (other.num_tokens, other.digest):
        raise Refused(
            "the prompts, cache salts or adapters of both engines differ: send both the same request", "prompt"
        )
    if one.sampling != other.sampling:
        raise Refused(
            "the sampling parameters of both engines differ: send both the same, but for max_tokens", "prompt"
        )
