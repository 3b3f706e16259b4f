"""The errors of a link between two engines."""

from __future__ import annotations

from hybridkv.errors import HybridKVError


class LinkError(HybridKVError):
    """Base of all errors of a link. Raised itself for a failure inside the peer, or a peer of another version."""


class PeerDown(LinkError):  # noqa: N818 - reads as what it says
    """The peer does not listen, or has closed the connection."""


class PeerGone(PeerDown):
    """Nothing listens at the peer's address, or another process does: the peer has ended."""


class PeerSilent(LinkError):  # noqa: N818
    """The peer has not answered in time. It may still execute the call."""


class PeerUnproven(LinkError):  # noqa: N818
    """The peer does not know the shared secret, or a message was changed on its way."""


class PeerStranger(PeerUnproven):
    """The process at the peer's address does not know the secret. Nothing was sent to it but a greeting."""


class Refused(LinkError):  # noqa: N818
    """The peer's handler refuses the call. `kind`: a word for programs."""

    def __init__(self, reason: str, kind: str = "refused") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


class LinkMismatch(LinkError):  # noqa: N818
    """Two engines cannot exchange cache pages: their models or layouts differ, or pages that one needs are missing."""
