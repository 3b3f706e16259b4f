"""The field `hidden_states` of requests."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator

_MAX_LAYERS = 1024


class HiddenStatesRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    layers: list[int | Literal["final"]] | None = Field(
        None, min_length=1, max_length=_MAX_LAYERS, description="Default: the operator's, of --hidden-layers."
    )
    tokens: Literal["prompt", "all"] = Field("prompt", description="all: those of the reply too, but for the last.")


def _in_one_message(value: object, check: Any) -> object:
    """pydantic has an error for each type it tried."""
    try:
        return check(value)
    except ValidationError:
        raise ValueError(
            f'{reprlib.repr(value)}: pass true, false, or an object such as {{"layers": [2, 18, -1], "tokens": '
            '"prompt"}; a layer is a number or "final", and tokens are "prompt" or "all"'
        ) from None


HiddenStatesField = Annotated[HiddenStatesRequest | bool | None, WrapValidator(_in_one_message)]
