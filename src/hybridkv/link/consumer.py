"""The consuming half of a link: claims prompts of producers, verifies what lands, and waits until pages are safe.

One thread takes NIXL's messages, watches deadlines and renews leases. A few others make calls to producers: each
producer has its own, so that one that does not answer delays no call to another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from hybridkv.link.agent import Agent
from hybridkv.link.arena import Arena
from hybridkv.link.arrival import Arrival, Stage, Wanted
from hybridkv.link.errors import (
    LinkError,
    LinkMismatch,
    PeerDown,
    PeerGone,
    PeerSilent,
    PeerStranger,
    PeerUnproven,
    Refused,
)
from hybridkv.link.messages import Message, decode, pages_to_json
from hybridkv.link.peers import Peer
from hybridkv.link.stats import LinkStats
from hybridkv.workers import Workers

LOG = logging.getLogger("hybridkv.link")

_CALLERS = 3
"""Threads for calls to one producer."""
_POLL_S = 0.0005
_LONGEST_POLL_S = 0.002
_IDLE_S = 0.02
"""Time since the last claim or message after which polls become rare: a prompt is being computed."""
_SETTLE_EVERY_S = 0.25
_DEAD_AFTER_S = 1.0
"""A producer whose address was found without it twice, this far apart, is dead, and what it sent has landed."""
_RENEWALS = 4
"""A lease is renewed at least this often in its time."""
_RENEW_EVERY_S = 1.0
"""And this often: a renewal also shows that the producer lives."""


class Consumer:
    """All arrivals of one engine. The engine calls `expect`, `claim` and `give_up` on its thread."""

    def __init__(
        self,
        engine_id: str,
        agent: Agent,
        arena: Arena,
        peers: Sequence[Peer],
        stats: LinkStats,
        *,
        timeout_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change`: called on any thread when an arrival is over or settled."""
        self._engine_id = engine_id
        self._agent = agent
        self._arena = arena
        self._peers = {peer.url: peer for peer in peers}
        self._stats = stats
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._clock = clock
        self._changed = threading.Condition()
        self._arrivals: dict[str, Arrival] = {}
        """By claim: those that are not over, or not settled."""
        self._gone_since: dict[str, float] = {}
        """By claim: when its producer was first found gone."""
        self._renewing: set[str] = set()
        """Peers with a renewal in progress."""
        self._active_at = 0.0
        """When a prompt was claimed, or a message came."""
        self._is_closed = False
        self._callers = {peer.url: Workers(_CALLERS, "hybridkv-link-call") for peer in peers}
        self._thread = threading.Thread(target=self._run, name="hybridkv-link", daemon=True)
        self._thread.start()
        for peer in peers:
            self._callers[peer.url].submit(partial(self._warm_up, peer))

    # --- the engine ---------------------------------------------------------------------------------------------------

    def expect(self, url: str, request_id: str, *, is_early: bool = False) -> Arrival:
        """A request has come whose prompt waits at a producer. The producer's lease is renewed from now on."""
        arrival = Arrival(self._peers[url], request_id, is_early=is_early)
        with self._changed:
            self._arrivals[arrival.id] = arrival
            self._changed.notify()
        return arrival

    def claim(self, arrival: Arrival, wanted: Wanted) -> None:
        """Ask for the prompt. Its pages belong to the arrival until it is done, or settled."""
        if not arrival.claimed(wanted, self._timeout_s):  # it has failed just now
            self._on_change()
            return
        self._active_at = self._clock()
        self._callers[arrival.peer.url].submit(lambda: self._claim(arrival, wanted))
        with self._changed:
            self._changed.notify()

    def give_up(self, arrival: Arrival, reason: str) -> None:
        """The engine needs the prompt no more."""
        was_waiting = arrival.stage is Stage.WAITING
        self._fail(arrival, "aborted", reason)
        if was_waiting:
            self._callers[arrival.peer.url].submit(lambda: self._release(arrival))

    @property
    def num_arrivals(self) -> int:
        return len(self._arrivals)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop, after all arrivals are settled, or after `timeout_s`. False: producers may still write to pages."""
        with self._changed:
            arrivals = list(self._arrivals.values())
        for arrival in arrivals:
            self.give_up(arrival, "the engine was closed")
        deadline = self._clock() + timeout_s
        while any(not one.is_settled for one in arrivals) and self._clock() < deadline:
            time.sleep(_POLL_S)
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        for callers in self._callers.values():
            callers.close(timeout_s / len(self._callers))
        for peer in self._peers.values():
            peer.close()
        return all(one.is_settled for one in arrivals)

    # --- calls to producers -------------------------------------------------------------------------------------------

    def _warm_up(self, peer: Peer) -> None:
        try:
            peer.connect()
        except (LinkMismatch, PeerUnproven, Refused) as error:
            LOG.error("%s cannot be used: %s", peer.url, error)
        except LinkError as error:
            LOG.info("%s is not connected yet: %s", peer.url, error)

    def _claim(self, arrival: Arrival, wanted: Wanted) -> None:
        begin = time.monotonic()
        try:
            connection = arrival.peer.connect()
            try:
                self._ask(arrival, wanted)
            except Refused as refused:
                if refused.kind != "unconnected":
                    raise
                arrival.engine_id = ""
                arrival.peer.connect(after=connection)
                self._ask(arrival, wanted)
        except (Refused, LinkMismatch, PeerStranger) as error:
            kind = _kind_of(error)
            self._fail(arrival, kind, str(error), is_settled=True)
            if kind == "prompt":  # this consumer was to have it, and no other will ask
                self._release(arrival)
        except LinkError as error:
            self._fail(arrival, _kind_of(error), str(error), is_settled=not arrival.engine_id)
        except BaseException as error:  # a bug: the request computes its prompt instead
            LOG.exception("a claim has failed")
            self._fail(arrival, "error", repr(error))
        finally:
            arrival.is_asking = False
        self._stats.spent("claim", time.monotonic() - begin)

    def _ask(self, arrival: Arrival, wanted: Wanted) -> None:
        if arrival.is_over:
            raise LinkError("the request does not wait any more")
        arrival.engine_id = arrival.peer.engine_id
        geometry = arrival.peer.cutter.target
        before = wanted.start // geometry.block_tokens * geometry.block_tokens
        arrival.full_attention_bytes = geometry.full_attention_bytes(wanted.end - before)
        arrival.peer.client.call(
            "claim",
            {
                "engine_id": self._engine_id,
                "request_id": arrival.request_id,
                "claim": arrival.id,
                "num_tokens": wanted.end,
                "digest": wanted.digest,
                "sampling": wanted.sampling,
                "start": wanted.start,
                "pages": pages_to_json(wanted.pages),
                "early": arrival.is_early,
            },
        )

    def _release(self, arrival: Arrival) -> None:
        try:
            arrival.peer.client.call("release", {"request_id": arrival.request_id})
        except LinkError as error:
            LOG.debug("release of %s: %s", arrival.request_id, error)

    def _renew(self, peer: Peer, arrivals: Sequence[Arrival]) -> None:
        try:
            answer = peer.client.call("renew", {"request_ids": [one.request_id for one in arrivals]})
            known = set(answer["known"])
        except PeerDown as error:
            for arrival in arrivals:
                self._fail(arrival, "peer", str(error))
            return
        except LinkError as error:
            LOG.warning("leases at %s are not renewed: %s", peer.url, error)
            return
        finally:
            self._renewing.discard(peer.url)
        for arrival in arrivals:
            if arrival.request_id not in known and arrival.stage is Stage.WAITING and not arrival.is_early:
                self._fail(arrival, "unknown", f"{peer.url} has no prompt {arrival.request_id}: its lease has ended")

    def _settle(self, arrival: Arrival) -> None:
        """Find out whether the producer may still write to the pages of a failed arrival."""
        try:
            answer = arrival.peer.client.call("cancel", {"claim": arrival.id})
            is_gone, is_settled = answer["engine_id"] != arrival.engine_id, bool(answer["settled"])
        except (PeerGone, PeerStranger):
            is_gone, is_settled = True, False
        except LinkError as error:
            LOG.debug("%s does not say whether it still writes: %s", arrival.peer.url, error)
            is_gone, is_settled = False, False
        finally:
            arrival.is_settling = False
        if is_gone:
            since = self._gone_since.setdefault(arrival.id, self._clock())
            is_settled = self._clock() - since >= _DEAD_AFTER_S
        else:
            self._gone_since.pop(arrival.id, None)
        if is_settled:
            arrival.settle()
            self._after(arrival)

    # --- the link's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_care = 0.0
        renewed_at: dict[str, float] = {}
        while True:
            with self._changed:
                while not self._arrivals and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
            now = self._clock()
            if self._take_messages():
                self._active_at = self._clock()
            if now >= next_care:
                self._care(now, renewed_at)
                next_care = now + 0.05
            time.sleep(_LONGEST_POLL_S if now - self._active_at > _IDLE_S else _POLL_S)

    def _take_messages(self) -> bool:
        """Returns whether any came."""
        messages = self._agent.messages()
        for sender, data in messages:
            try:
                message = decode(data)
            except LinkError as error:
                LOG.warning("a message of %s is dropped: %s", sender, error)
                continue
            arrival = self._arrivals.get(message.claim)
            if arrival is not None:
                self._hear(arrival, message)
        return bool(messages)

    def _hear(self, arrival: Arrival, message: Message) -> None:
        try:
            arrival.hear(message, self._arena)
        except Exception as error:  # what it names does not exist: the request computes its prompt instead
            LOG.warning("a message of %s makes no sense", arrival.peer.url, exc_info=error)
            self._fail(arrival, "protocol", str(error))
        self._after(arrival)

    def _after(self, arrival: Arrival) -> None:
        """Count an arrival that is over, once. Forget it if it is settled. Tell the engine in any case."""
        if not arrival.is_over:
            return
        if arrival.count_once():
            if arrival.stage is Stage.DONE:
                self._stats.received(arrival)
                self._stats.spent("arrive", arrival.seconds)
                self._stats.spent("verify", arrival.verify_seconds)
            else:
                assert arrival.failure is not None
                self._stats.count_failure(arrival.failure)
                level = logging.DEBUG if arrival.failure == "aborted" else logging.WARNING
                LOG.log(level, "a prompt does not come from %s: %s", arrival.peer.url, arrival.reason)
        with self._changed:
            if arrival.is_settled:
                self._arrivals.pop(arrival.id, None)
                self._gone_since.pop(arrival.id, None)
            self._stats.quarantined = sum(one.is_over for one in self._arrivals.values())
        self._on_change()

    def _care(self, now: float, renewed_at: dict[str, float]) -> None:
        """Deadlines, renewals, and arrivals whose pages may still be written to."""
        by_peer: dict[Peer, list[Arrival]] = {}
        unsettled: list[Arrival] = []
        with self._changed:
            arrivals = list(self._arrivals.values())
        for arrival in arrivals:
            if arrival.stage is Stage.CLAIMED and now >= arrival.deadline:
                self._fail(arrival, "timeout", f"not complete after {self._timeout_s:g} s")
            if arrival.is_over:
                unsettled.append(arrival)
            else:
                by_peer.setdefault(arrival.peer, []).append(arrival)
        for peer, waiting in by_peer.items():
            is_due = now - renewed_at.get(peer.url, 0.0) >= min(_RENEW_EVERY_S, (peer.lease_s or 1.0) / _RENEWALS)
            if is_due and peer.url not in self._renewing:
                renewed_at[peer.url] = now
                self._renewing.add(peer.url)
                self._callers[peer.url].submit(partial(self._renew, peer, waiting))
        for arrival in unsettled:
            if now >= arrival.next_settle and not arrival.is_asking and not arrival.is_settling:
                arrival.next_settle = now + _SETTLE_EVERY_S
                arrival.is_settling = True
                self._callers[arrival.peer.url].submit(partial(self._settle, arrival))

    def _fail(self, arrival: Arrival, kind: str, reason: str, *, is_settled: bool = False) -> None:
        arrival.fail(kind, reason, is_settled=is_settled)
        self._after(arrival)


def _kind_of(error: LinkError) -> str:
    """Kind of failure of a claim."""
    match error:
        case Refused():
            return error.kind
        case LinkMismatch():
            return "mismatch"
        case PeerUnproven():
            return "unproven"
        case PeerSilent():
            return "timeout"
    return "peer"
