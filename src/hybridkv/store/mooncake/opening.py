"""Opens a Mooncake store from its URL: `mooncake://master:50051?protocol=tcp`."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from hybridkv.errors import StoreFault, StoreInputError
from hybridkv.store.address import Address
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.mooncake.admin import Admin
from hybridkv.store.mooncake.blobs import MooncakeBlobs, MooncakeStore
from hybridkv.store.mooncake.calls import Calls
from hybridkv.store.mooncake.client import Client, RawClient
from hybridkv.store.mooncake.staging import Staging

_MASTER_PORT = 50051
_ADMIN_PORT = 9003
_TIMEOUT_S = 5.0
_SETUP_S = 20.0
"""For setting up a client, which takes time of its own: threads, ports, registering memory with RDMA devices."""
_BUFFER_BYTES = 512 << 20
_LEAST_BUFFER_BYTES = 1 << 20
_OWN_BUFFER_BYTES = 16 << 20
"""The client's own memory, for descriptions."""
_RPC_MAGIC = b"\x15"
_UNKNOWN_CALL = _RPC_MAGIC + bytes(19)
"""Header of a call of function 0 in the RPC format of masters. They answer that they have no such function."""


def open_address(address: Address, size: int) -> BlobStore:
    """Connect to the master. `size` has no meaning here: Mooncake evicts by itself."""
    if address.path.strip("/"):
        raise StoreInputError(f"{address.url!r}: Mooncake has no paths; write it as {address.example}")
    host, port = _place(address, address.host, _MASTER_PORT)
    admin_host, admin_port = _place(address, address.options.get("admin", host), _ADMIN_PORT)
    buffer_bytes = address.size_or(_BUFFER_BYTES, "buffer") or 0
    if buffer_bytes < _LEAST_BUFFER_BYTES:
        raise StoreInputError(f"{address.url!r}: a buffer of {buffer_bytes:,} bytes; give it 1MiB or more")
    module = _import(address)
    calls = Calls(address.label, address.seconds("timeout", _TIMEOUT_S))
    client = _connect(address, module, calls, f"{host}:{port}", Staging(address.label, buffer_bytes))
    pinned = module.ReplicateConfig()
    pinned.with_hard_pin = True
    return MooncakeStore(MooncakeBlobs(client, Admin(admin_host, admin_port, calls), pinned))


def _connect(address: Address, module: Any, calls: Calls, master: str, staging: Staging) -> Client:
    local = _ask(master, calls.timeout_s)
    raw: RawClient = module.MooncakeDistributedStore()
    client = Client(raw, calls, staging)
    try:
        code = calls.run("connect", lambda: _set_up(address, raw, local, master, staging), timeout_s=_SETUP_S)
    except StoreFault:
        client.close()
        raise
    if code != 0:
        client.close()
        raise StoreFault(f"{address.label}: cannot connect to the master at {master}: error code {code}")
    return client


def _set_up(address: Address, raw: RawClient, local: str, master: str, staging: Staging) -> int:
    options = address.options
    code = raw.setup(
        local,
        options.get("metadata", "P2PHANDSHAKE"),
        0,
        _OWN_BUFFER_BYTES,
        options.get("protocol", "tcp"),
        options.get("device", ""),
        master,
    )
    return code or raw.register_buffer(staging.address, staging.nbytes)


def _import(address: Address) -> Any:
    os.environ.setdefault("GLOG_minloglevel", "3")  # the client logs its steps, and misses as errors, to stderr
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreInputError(
            f"{address.url!r}: Mooncake's client cannot be imported ({error}); pip install 'hybridkv[mooncake]', and "
            "install Debian's libibverbs1, libnl-3-200 and libnl-route-3-200 or the same of another system"
        ) from None
    if not hasattr(module.MooncakeDistributedStore, "batch_put_session_start"):
        raise StoreInputError(f"{address.url!r}: Mooncake's client is too old; pip install 'hybridkv[mooncake]'")
    return module


def _place(address: Address, text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, default_port
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StoreInputError(f"{address.url!r}: {text!r} is no HOST:PORT; write it as {address.example}")
    return host, int(port)


def _ask(master: str, timeout_s: float) -> str:
    """Ask the master something small. Returns this machine's address on the way there, by which others reach it.

    The client's `setup` holds the interpreter's lock and tries for minutes: no other thread could run, so it is called
    only if something answers like a master.
    """
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_UNKNOWN_CALL)
            answer = connection.recv(1)
            local = str(connection.getsockname()[0])
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise StoreFault(f"cannot connect to Mooncake's master at {master}: {reason}") from None
    if answer != _RPC_MAGIC:
        raise StoreFault(f"cannot connect to Mooncake's master at {master}: it does not answer like one")
    return local
