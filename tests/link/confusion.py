"""Messages between linked engines that are lost, repeated, reordered, or joined by rubbish."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hybridkv.link.agent import Agent


class Confusion:
    """What may happen to messages. Each method replaces `Agent.messages`."""

    def __init__(self, agent: Agent) -> None:
        self._messages = agent.messages
        self._held: list[tuple[str, bytes]] = []
        self._number = 0

    def drop(self, kind: str, number: int) -> list[tuple[str, bytes]]:
        """The `number`-th message of a kind is lost."""
        left = []
        for sender, data in self._messages():
            if f'"kind":"{kind}"'.encode() in data:
                self._number += 1
                if self._number == number + 1:
                    continue
            left.append((sender, data))
        return left

    def repeat(self) -> list[tuple[str, bytes]]:
        """Every message comes three times."""
        return [one for one in self._messages() for _ in range(3)]

    def repeat_first_drop_last(self) -> list[tuple[str, bytes]]:
        """The first parcel is reported twice, and the second never."""
        found = []
        for sender, data in self._messages():
            if b'"kind":"parcel"' in data:
                self._number += 1
                if self._number == 1:
                    found.append((sender, data))
                elif self._number == 2:
                    continue
            found.append((sender, data))
        return found

    def forget_first_tokens(self) -> list[tuple[str, bytes]]:
        """The end of a prompt says nothing of the tokens that its producer has sampled."""
        return [(sender, re.sub(rb'"first":\[.*\]', b'"first":[]', data)) for sender, data in self._messages()]

    def reverse(self) -> list[tuple[str, bytes]]:
        """Messages come in the opposite order, after the end was sent."""
        self._held += self._messages()
        if not any(b'"kind":"end"' in data for _, data in self._held):
            return []
        held, self._held = self._held[::-1], []
        return held

    def babble(self, rubbish: Sequence[bytes]) -> list[tuple[str, bytes]]:
        """Rubbish comes before and after each message. CLAIM stands for the claim of that message."""
        found = []
        for sender, data in self._messages():
            claim = data.split(b'"claim":"')[1].split(b'"')[0]
            garbage = [(sender, one.replace(b"CLAIM", claim)) for one in rubbish]
            found += [*garbage, (sender, data), *garbage]
        return found
