"""Lists of layers as options have them: 2,18,34,final."""

from __future__ import annotations

from hybridkv.errors import InputError


def parse_layers(option: str, text: str) -> list[int | str]:
    try:
        return [part.strip() if part.strip() == "final" else int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: write numbers with commas between them, such as 2,18,34") from None
