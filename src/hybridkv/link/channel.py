"""One connection of a control client, and its session. `control` describes the protocol."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from hybridkv.link import control
from hybridkv.link.errors import LinkError, PeerDown, PeerGone, PeerSilent, PeerStranger, PeerUnproven
from hybridkv.link.secret import Secret


class Reply(NamedTuple):
    status: int
    body: bytes
    mac: str


@dataclass(slots=True)
class _Session:
    name: str
    key: bytes
    number: int = 0
    """Of the last call."""


class Channel:
    """Used by one thread at a time. After an error of the connection, it is closed and of no further use."""

    def __init__(self, url: str, host: str, port: int, secret: Secret, max_body_bytes: int) -> None:
        self._url = url
        self._secret = secret
        self._max_body_bytes = max_body_bytes
        self._connection = HTTPConnection(host, port)
        self._session: _Session | None = None

    def close(self) -> None:
        self._connection.close()

    def call(self, body: bytes, timeout_s: float) -> Reply:
        """The authenticated reply to an authenticated call."""
        deadline = time.monotonic() + timeout_s
        for _ in range(2):  # a second time if the server does not know the session
            session = self._session = self._session or self._hello(deadline)
            session.number += 1
            headers = {
                control.SESSION_HEADER: session.name,
                control.NUMBER_HEADER: str(session.number),
                control.MAC_HEADER: control.call_mac(session.key, session.name, session.number, body),
            }
            reply = self._post("/call", body, headers, deadline)
            if control.is_same(reply.mac, control.reply_mac(session.key, session.name, session.number, reply.body)):
                return reply
            self._check_unauthenticated(reply, session)
            self._session = None
        raise PeerDown(f"{self._url} forgets its sessions at once: it has too many clients; call again later")

    def _hello(self, deadline: float) -> _Session:
        """Say hello. Raises PeerStranger before anything else is sent if the server does not know the secret."""
        nonce = secrets.token_hex(control.NONCE_BYTES)
        body = control.to_json({"version": control.VERSION, "nonce": nonce})
        reply = self._post("/hello", body, {}, deadline)
        message = control.to_object(reply.body) or {}
        version, server_nonce, proof = (message.get(name) for name in ("version", "nonce", "proof"))
        if isinstance(version, int) and version != control.VERSION:
            raise LinkError(
                f"{self._url} speaks version {version} of the link, this process version {control.VERSION}: run the "
                "same hybridkv on both sides"
            )
        self._check_busy(reply)
        if not isinstance(server_nonce, str) or not isinstance(proof, str) or not control.is_nonce(server_nonce):
            raise self._unproven()
        if not control.is_same(proof, control.server_proof(self._secret, nonce, server_nonce)):
            raise self._unproven()
        return _Session(server_nonce, control.session_key(self._secret, nonce, server_nonce))

    def _check_unauthenticated(self, reply: Reply, session: _Session) -> None:
        """Raise what a reply without a valid MAC means. Returns if the server proves that the session is unknown."""
        self._check_busy(reply)
        message = control.to_object(reply.body) or {}
        error, proof = message.get("error"), message.get("proof")
        if reply.status == 401 and error == control.REPLAYED:
            raise PeerDown(f"{self._url} has lost the connection during a call, and may have executed it")
        expected = control.unknown_proof(self._secret, session.name, str(session.number))
        if reply.status == 401 and isinstance(proof, str) and control.is_same(proof, expected):
            return
        raise PeerUnproven(
            f"{self._url} has sent a reply (status {reply.status}) without a valid proof: a message was changed on its "
            "way, or the peers' secrets differ"
        )

    def _check_busy(self, reply: Reply) -> None:
        if reply.status == 503:
            raise PeerDown(f"{self._url} has as many connections as it allows: call again later")

    def _post(self, path: str, body: bytes, headers: dict[str, str], deadline: float) -> Reply:
        """Send a message. A connection that was kept and turns out to be closed is opened again, once."""
        is_kept = self._connection.sock is not None
        try:
            return self._exchange(path, body, headers, deadline)
        except _NoReply as error:
            self._connection.close()
            if not is_kept:
                raise self._down(error) from error
        try:
            return self._exchange(path, body, headers, deadline)
        except _NoReply as error:
            raise self._down(error) from error

    def _exchange(self, path: str, body: bytes, headers: dict[str, str], deadline: float) -> Reply:
        connection = self._connection
        try:
            self._set_timeout(deadline)
            try:
                connection.request("POST", path, body, headers)
                self._set_timeout(deadline)
                response = connection.getresponse()
            except ConnectionRefusedError as error:
                raise PeerGone(f"{self._url} is not there ({error}): check that its process runs") from error
            except ConnectionError as error:
                raise _NoReply(str(error)) from error
            if (response.length or 0) > self._max_body_bytes:
                raise LinkError(f"{self._url} sends a reply of {response.length} bytes, more than is allowed")
            content = response.read() if response.length is not None else response.read(self._max_body_bytes)
            return Reply(response.status, content, response.headers.get(control.MAC_HEADER, ""))
        except TimeoutError as error:
            raise PeerSilent(
                f"{self._url} has not answered in time: check that its process runs and is not overloaded"
            ) from error
        except (OSError, HTTPException) as error:
            raise self._down(error) from error

    def _set_timeout(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.timeout = left
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left)

    def _unproven(self) -> PeerStranger:
        return PeerStranger(
            f"{self._url} does not prove that it knows the link secret: give both sides the same secret, and check "
            "that the address is that of an engine's link"
        )

    def _down(self, error: Exception) -> PeerDown:
        return PeerDown(f"{self._url} cannot be reached ({error}): check that its process runs and listens there")


class _NoReply(Exception):  # noqa: N818
    """The connection failed before a byte of the reply came."""
