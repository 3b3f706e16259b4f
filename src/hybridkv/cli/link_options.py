"""Options of `hybridkv serve` that link it to other servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridkv.errors import InputError

if TYPE_CHECKING:
    from hybridkv.link.link import LinkOptions

_FLAGS = {
    "peers": "--peer",
    "host": "--link-host",
    "port": "--link-port",
    "secret_file": "--link-secret-file",
    "lease_s": "--link-lease",
    "timeout_s": "--link-timeout",
    "offer_share": "--link-offer-share",
    "checksums": "--no-link-checksums",
}


def link_options(role: str | None, **given: Any) -> LinkOptions | None:
    """The checked options, or None without a role. `given`: None for each that was left out."""
    named = {name: value for name, value in given.items() if value is not None and value != []}
    if role is None:
        if named:
            raise InputError(f"{_FLAGS[next(iter(named))]} without --role: give it a role, prefill, decode or both")
        return None
    from hybridkv.link.link import LinkOptions
    from hybridkv.link.secret import read_secret

    options = LinkOptions(role=role, **named)
    options.check()
    read_secret(options.secret_file)  # its absence is known before a model is loaded
    return options
