"""Answers control messages of engines that know the shared secret. `control` describes the protocol."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from hybridkv.errors import InputError
from hybridkv.link import control
from hybridkv.link.control_http import LOG, JsonRequests, Listener
from hybridkv.link.errors import Refused
from hybridkv.link.secret import Secret
from hybridkv.link.sessions import Sessions

Handler = Callable[[str, dict[str, Any], str], dict[str, Any]]
"""Called with a method's name, its parameters and the session, on a thread of the server. Returns what becomes JSON."""
_MAX_HELLO_BYTES = 4096


class ControlServer:
    """Listens from its construction until `close`. A handler raises `Refused` to refuse a call.

    A client has one session for each of its connections: the session does not name a client.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        handler: Handler,
        *,
        max_body_bytes: int = control.MAX_BODY_BYTES,
        max_connections: int = 64,
        max_sessions: int = 256,
        session_idle_s: float = 600.0,
        connection_idle_s: float = 300.0,
        request_s: float = 10.0,
    ) -> None:
        self.host = host or "127.0.0.1"
        self._exchange = _Exchange(secret, handler, Sessions(max_sessions, session_idle_s), max_body_bytes)

        class Requests(_Requests):
            exchange = self._exchange

        Requests.request_s, Requests.idle_s = request_s, connection_idle_s
        try:
            self._listener = Listener(self.host, port, max_connections, Requests)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise InputError(
                f"the link cannot listen on {self.host} port {port}: {reason}; choose another address"
            ) from None

    @property
    def port(self) -> int:
        port: int = self._listener.server_address[1]
        return port

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def refusals(self) -> dict[str, int]:
        """Messages that were not authenticated, by reason: `unproven`, `replayed`, `unknown session`, `version`."""
        return self._exchange.refusals

    def close(self, timeout_s: float = 1.0) -> None:
        """Close all connections; calls in progress get no reply. Waits `timeout_s` for running handlers at most."""
        self._listener.close(timeout_s)

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Exchange:
    """What all connections of a server share."""

    def __init__(self, secret: Secret, handler: Handler, sessions: Sessions, max_body_bytes: int) -> None:
        self.secret = secret
        self.sessions = sessions
        self.max_body_bytes = max_body_bytes
        self._handler = handler
        self._lock = threading.Lock()
        self._refusals: Counter[str] = Counter()

    @property
    def refusals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._refusals)

    def count(self, reason: str) -> None:
        with self._lock:
            self._refusals[reason] += 1

    def hello(self, client_nonce: str) -> bytes:
        server_nonce = secrets.token_hex(control.NONCE_BYTES)
        self.sessions.open(server_nonce, control.session_key(self.secret, client_nonce, server_nonce))
        proof = control.server_proof(self.secret, client_nonce, server_nonce)
        return control.to_json({"version": control.VERSION, "nonce": server_nonce, "proof": proof})

    def call(self, body: bytes, session: str) -> tuple[int, bytes]:
        """Execute an authenticated call. Returns the status and body of its reply."""
        message = control.to_object(body)
        method, params = (message.get("method"), message.get("params")) if message is not None else (None, None)
        if not isinstance(method, str) or not isinstance(params, dict):
            return 400, control.to_json({"failed": "the body is not a JSON object with a method and parameters"})
        try:
            reply = control.to_json({"result": self._handler(method, params, session)})
        except Refused as refused:
            return 409, control.to_json({"refused": refused.reason, "kind": refused.kind})
        except Exception:
            LOG.exception("the handler of link call %r has failed", method)
            return 500, control.to_json({"failed": "the handler has failed"})
        if len(reply) > self.max_body_bytes:
            LOG.error("the reply to link call %r has %d bytes, more than %d", method, len(reply), self.max_body_bytes)
            return 500, control.to_json({"failed": "the reply is too large"})
        return 200, reply


class _Requests(JsonRequests):
    """One connection."""

    exchange: _Exchange

    def answer_post(self) -> None:
        if self.path == "/call":
            self._call()
        elif self.path == "/hello":
            self._hello()
        else:
            self.refuse(404, "not found")

    def _hello(self) -> None:
        body = self.read_body(_MAX_HELLO_BYTES)
        if body is None:
            return
        message = control.to_object(body)
        if message is None:
            self.refuse(400, "not a JSON object")
        elif message.get("version") != control.VERSION:
            self.exchange.count("version")
            self.refuse(400, "version", version=control.VERSION)
        elif not control.is_nonce(message.get("nonce")):
            self.refuse(400, "not a nonce")
        else:
            self.reply(200, self.exchange.hello(message["nonce"]))

    def _call(self) -> None:
        exchange = self.exchange
        session, number_text = (self.headers.get(name, "") for name in (control.SESSION_HEADER, control.NUMBER_HEADER))
        number = control.number_of(number_text)
        if number is None or not control.is_nonce(session):
            self._refuse_401(control.UNPROVEN)
            return
        key = exchange.sessions.key_of(session, number)
        if key is None:
            self._refuse_unknown(session, number_text)
            return
        if not key:
            self._refuse_401(control.REPLAYED)
            return
        body = self.read_body(exchange.max_body_bytes)
        if body is None:
            return
        given = self.headers.get(control.MAC_HEADER, "")
        if not control.is_same(given, control.call_mac(key, session, number, body)):
            self._refuse_401(control.UNPROVEN, is_body_read=True)
            return
        if not exchange.sessions.accept(session, number):
            self._refuse_401(control.REPLAYED, is_body_read=True)
            return
        self.is_proven = True
        status, reply = exchange.call(body, session)
        self.reply(status, reply, {control.MAC_HEADER: control.reply_mac(key, session, number, reply)})

    def _refuse_401(self, reason: str, *, is_body_read: bool = False) -> None:
        self.exchange.count(reason)
        if is_body_read or self.skip_body(self.exchange.max_body_bytes):
            self.refuse(401, reason)

    def _refuse_unknown(self, session: str, number: str) -> None:
        """The connection stays open: the client says hello on it."""
        self.exchange.count(control.UNKNOWN_SESSION)
        if self.skip_body(self.exchange.max_body_bytes):
            proof = control.unknown_proof(self.exchange.secret, session, number)
            self.reply(401, control.to_json({"error": control.UNKNOWN_SESSION, "proof": proof}))
