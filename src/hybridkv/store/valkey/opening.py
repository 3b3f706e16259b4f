"""Opens stores by URL: valkey://host:6379/0, valkeys:// (TLS), valkey+unix:///path; the same with redis."""

from __future__ import annotations

import ssl

from hybridkv.errors import StoreFault, StoreInputError
from hybridkv.store.address import Address
from hybridkv.store.valkey.blobs import ValkeyStore
from hybridkv.store.valkey.connections import Login, Place, RefusedError
from hybridkv.store.valkey.servers import Servers

PASSWORD = "HYBRIDKV_VALKEY_PASSWORD"
_PORT = 6379
_TIMEOUT_S = 5.0


def open_address(address: Address, size: int) -> ValkeyStore:
    """Connect and log in. Raises StoreFault if the server cannot be reached, StoreInputError if it refuses the user."""
    is_unix = address.scheme.endswith("+unix")
    database = address.options.get("db", "") if is_unix else address.path.strip("/")
    login = Login(
        address.user,
        address.secret(PASSWORD),
        _database(address, database),
        _tls(address) if address.scheme in ("valkeys", "rediss") else None,
        address.seconds("timeout", _TIMEOUT_S),
    )
    place = Place(address.path, 0) if is_unix else _host(address)
    try:
        return ValkeyStore(Servers(place, login, address.label), size)
    except RefusedError as error:
        raise StoreInputError(str(error)) from None
    except StoreFault as error:
        way = "check the server's TLS port and ca_file=" if login.tls else "start a server there, or correct the URL"
        raise StoreFault(f"{error}; {way}") from None


def _database(address: Address, text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        quoted = "this path" if "@" in text else repr(text)  # it may be the rest of a password
        raise StoreInputError(f"{address.url!r}: {quoted} is no database; write a number, such as 0")
    return int(text)


def _host(address: Address) -> Place:
    host, _, port = address.host.rpartition(":") if not address.host.endswith("]") else (address.host, "", "")
    if not host:
        host, port = port, ""
    number = int(port) if port else _PORT
    if number == 0:
        raise StoreInputError(f"{address.url!r}: no server listens at port 0; write it as {address.example}")
    return Place(host.removeprefix("[").removesuffix("]"), number)


def _tls(address: Address) -> ssl.SSLContext:
    """The system's authorities, or those of `ca_file`. The server's name is checked."""
    file = address.options.get("ca_file")
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or "it holds no certificate"
        raise StoreInputError(f"ca_file={file} cannot be read: {reason}; name a file of certificates (PEM)") from None
