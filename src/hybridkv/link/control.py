"""The protocol of control messages between two engines: what `ControlServer` and `ControlClient` share.

    POST /hello  {"version": 1, "nonce": C}      ->  {"version": 1, "nonce": S, "proof": P}
    POST /call   {"method": ..., "params": ...}  ->  {"result": ...} or {"refused": ..., "kind": ...} or {"failed": ...}

P is an HMAC-SHA256 of both nonces with the shared secret. The client verifies it before it sends anything else. S names
the session, and the session's key is another HMAC of both nonces. A call has three headers: the session, a number that
grows with each call of the session, and an HMAC with the session's key of direction, session, number and body. Its
reply has such an HMAC too, with the same number and the other direction.

Whatever fails this gets a 401. A server that does not know a session, for example after a restart, proves with the
secret that it said so; the client then says hello again and repeats the call. A number is accepted once: a call that
is sent again after a lost connection is executed at most once.

**Not protected: confidentiality.** Messages are authenticated, not encrypted. The network between the peers must be
trusted not to be read: use a private network or a VPN. An attacker who can drop packets can also stop the exchange.

This package knows nothing of what is said.
"""

from __future__ import annotations

import hmac
import json
import re
from typing import Any

from hybridkv.link.secret import Secret

VERSION = 1
MAX_BODY_BYTES = 16 * 2**20
SESSION_HEADER = "X-Link-Session"
NUMBER_HEADER = "X-Link-Number"
MAC_HEADER = "X-Link-Mac"
UNKNOWN_SESSION = "unknown session"
REPLAYED = "replayed"
UNPROVEN = "unproven"
NONCE_BYTES = 32

_NONCE = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,18}")
_LABEL = f"hybridkv-link/{VERSION}"


def is_nonce(value: object) -> bool:
    """Whether a value is a nonce, or the name of a session."""
    return isinstance(value, str) and _NONCE.fullmatch(value) is not None


def number_of(text: str) -> int | None:
    """The number of a call in a header, or None."""
    return int(text) if _NUMBER.fullmatch(text) else None


def server_proof(secret: Secret, client_nonce: str, server_nonce: str) -> str:
    """What a server answers to hello, to prove that it knows the secret."""
    return secret.mac(f"{_LABEL} server hello", client_nonce, server_nonce).hex()


def unknown_proof(secret: Secret, session: str, number: str) -> str:
    """What a server says of a session that it does not know."""
    return secret.mac(f"{_LABEL} unknown session", session, number).hex()


def session_key(secret: Secret, client_nonce: str, server_nonce: str) -> bytes:
    return secret.mac(f"{_LABEL} session key", client_nonce, server_nonce)


def call_mac(key: bytes, session: str, number: int, body: bytes) -> str:
    return _message_mac(key, "call", session, number, body)


def reply_mac(key: bytes, session: str, number: int, body: bytes) -> str:
    return _message_mac(key, "reply", session, number, body)


def _message_mac(key: bytes, direction: str, session: str, number: int, body: bytes) -> str:
    return hmac.digest(key, f"{direction}\n{session}\n{number}\n".encode() + body, "sha256").hex()


def is_same(given: str, expected: str) -> bool:
    """Compare two MACs in constant time. `given` may be any text."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def to_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def to_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object in a body, or None if there is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
