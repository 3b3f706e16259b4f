"""Byte sizes as people write and read them."""

import re

from hybridkv.errors import InputError

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_LARGEST = 2**60
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?:(?P<prefix>[KMGTP])(?P<suffix>I?B)?|B)?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in `text`: "80GiB" and "80G" are binary, "80GB" is decimal, a bare number is bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a size: write it as 80GiB, 80G, 80GB, 512M or a number of bytes")
    prefix, suffix, number = (match["prefix"] or "").upper(), (match["suffix"] or "").upper(), match["number"]
    scale = _DECIMAL[prefix] if suffix == "B" else _BINARY[prefix]
    nbytes = _LARGEST if len(number) > 30 else int(float(number) * scale) if "." in number else int(number) * scale
    if nbytes >= _LARGEST:
        raise InputError(f"{text[:40]!r} is more than any machine has: write a size below 1024PiB")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """`nbytes` with a binary unit and at most one decimal, the way `parse_size` reads it back."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" or size == int(size) else f"{size:,.1f} {unit}"


def format_at_least(nbytes: int) -> str:
    """`nbytes` rounded up to a round size that a user can pass back in, such as 212MiB."""
    unit, scale = next(
        (u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)) if nbytes >= 100 * s or s == 1
    )
    return f"{-(-nbytes // scale)}{unit}"
