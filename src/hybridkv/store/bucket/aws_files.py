"""Settings from the files of AWS's tools, which obstore does not read: static keys and the region of a profile."""

from __future__ import annotations

import os
from configparser import ConfigParser, Error
from pathlib import Path

from hybridkv.errors import StoreInputError
from hybridkv.files import FileError, read_text

_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_OTHER_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""obstore reads these itself, and they come before files."""


def aws_settings(region: str | None) -> dict[str, str]:
    """Options for `S3Store`: the region, and keys if only a file has them."""
    profile = os.environ.get("AWS_PROFILE", "default")
    found: dict[str, str] = {}
    if not any(os.environ.get(variable) for variable in _OTHER_SOURCES):
        section = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
        if all(section.get(key) for key in list(_KEYS)[:2]):
            found = {option: section[key] for key, option in _KEYS.items() if section.get(key)}
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        name = profile if profile == "default" else f"profile {profile}"
        region = _section("AWS_CONFIG_FILE", "config", name).get("region")
    return found | {"region": region or "us-east-1"}


def _section(variable: str, file: str, name: str) -> dict[str, str]:
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / file)
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(read_text(path))
    except Error as error:  # its message has lines of the file, which may be secret
        raise StoreInputError(f"{path} cannot be read ({type(error).__name__}): repair it, or name another") from None
    except FileError as error:
        if error.is_missing:
            return {}
        raise StoreInputError(f"{path} cannot be read ({error}): repair it, or name another") from None
    return dict(parser[name]) if parser.has_section(name) else {}
