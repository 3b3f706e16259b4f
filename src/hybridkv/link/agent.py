"""The seam to NIXL: one agent that writes from an arena into the arenas of peers. Nothing else imports `nixl`.

NIXL moves bytes by UCX: by `process_vm_writev` (CMA) between processes of one user on one host, by tcp otherwise. A CMA
write is complete when `write` returns; a tcp write continues on UCX's progress thread.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from hybridkv.errors import InputError
from hybridkv.link.arena import Offsets, Place
from hybridkv.link.errors import PeerDown
from hybridkv.link.interfaces import interface_of

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""The same API under three names. The first does not pull CUDA."""
_NO_NIXL = "a link between engines needs NIXL: pip install 'hybridkv[link]'"
_PROGRESS_DELAY_US = 1000
"""Pause of UCX's progress thread. NIXL's Python wrapper has 0: notifications then take 32 ms, and half a core."""


class Write:
    """A write that was posted. Its source and target belong to it until `is_done` is True or raises."""

    def __init__(self, agent: Agent, handle: Any, state: str, peer: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state
        self._peer = peer

    @property
    def is_done(self) -> bool:
        """Raises `PeerDown` if the write has failed."""
        if self._state == "PROC":
            self._state = self._agent.state_of(self._handle, self._peer)
        if self._state == "PROC":
            return False
        self._agent.release(self._handle)
        return True


class Agent:
    """NIXL in this process, for one arena. Thread-safe."""

    def __init__(self, name: str, place: Place, host: str) -> None:
        """`host`: address of the interface that UCX listens on. $UCX_NET_DEVICES has precedence."""
        self.name = name
        self.place = place
        api = _nixl()
        os.environ.setdefault("UCX_NET_DEVICES", interface_of(host))  # UCX reads it when the agent is made
        self._errors = tuple(
            one for one in vars(api.nixlBind).values() if isinstance(one, type) and issubclass(one, Exception)
        )
        self._nixl = _patient_agent(api, name)
        self._registered = self._nixl.register_memory([(place.address, place.nbytes, place.device, "")], place.kind)
        self.metadata: bytes = self._nixl.get_agent_metadata()
        """What a peer needs to write into this process. It is a key to all its memory."""

    def add(self, metadata: bytes) -> str:
        """Make a peer known, and return its name."""
        name: str | bytes = self._nixl.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def remove(self, peer: str) -> None:
        self._nixl.remove_remote_agent(peer)

    def close(self) -> None:
        """Call when no write from or to this arena is in progress."""
        self._nixl.deregister_memory(self._registered)

    def write(
        self, peer: str, place: Place, source: Offsets, target: Offsets, nbytes: Offsets, message: bytes
    ) -> Write:
        """Write runs of the arena into the arena of `peer`, which lies at `place`. Then the peer gets `message`."""
        local = self._descriptors(self.place, source, nbytes)
        remote = self._descriptors(place, target, nbytes)
        try:
            handle = self._nixl.initialize_xfer("WRITE", local, remote, peer, message)
            return Write(self, handle, self._nixl.transfer(handle), peer)
        except self._errors as error:
            raise PeerDown(f"{peer} cannot be written to: {error}") from error

    def tell(self, peer: str, message: bytes) -> None:
        """Send a message without a write."""
        try:
            self._nixl.send_notif(peer, message)
        except self._errors as error:
            raise PeerDown(f"{peer} cannot be told anything: {error}") from error

    def messages(self) -> list[tuple[str, bytes]]:
        """New messages with the names of their senders. The bytes of a write have landed when its message is here."""
        found: dict[str, Sequence[bytes]] = self._nixl.get_new_notifs()
        return [(sender, message) for sender, messages in found.items() for message in messages]

    def state_of(self, handle: Any, peer: str) -> str:
        try:
            state: str = self._nixl.check_xfer_state(handle)
        except self._errors as error:
            self.release(handle)
            raise PeerDown(f"a write to {peer} has failed: {error}") from error
        return state

    def release(self, handle: Any) -> None:
        """Forget a write that is done or has failed."""
        handle.release()

    def _descriptors(self, place: Place, offsets: Offsets, nbytes: Offsets) -> Any:
        table = np.empty((len(offsets), 3), np.uint64)
        table[:, 0] = offsets
        table[:, 0] += np.uint64(place.address)
        table[:, 1] = nbytes
        table[:, 2] = place.device
        return self._nixl.get_xfer_descs(table, place.kind)


def check_nixl() -> None:
    """Raises InputError if NIXL is not installed. It is not imported yet."""
    if not any(find_spec(package) for package in _PACKAGES):
        raise InputError(_NO_NIXL)


def _nixl() -> ModuleType:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # it tells each agent's start otherwise
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._api"):
                raise
    raise InputError(_NO_NIXL)


def _patient_agent(api: ModuleType, name: str) -> Any:
    """An agent with a progress delay. The wrapper sets it to 0 on its way to the constructor of the binding."""
    bindings: Any = api.nixlBind
    constructor = bindings.nixlAgent

    def patient(name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_DELAY_US
        return constructor(name, config)

    bindings.nixlAgent = patient
    try:
        config = api.nixl_agent_config(sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        return api.nixl_agent(name, config)
    finally:
        bindings.nixlAgent = constructor
