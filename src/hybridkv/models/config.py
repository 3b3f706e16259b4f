"""Typed access to one Hugging Face config: the value, else the family's default, else a clear error.

transformers leaves out of config.json (or has left out, in older releases) whatever equals the default of the config
class, so each family brings those defaults along. Nothing here knows what the values mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridkv.errors import ConfigError, MissingFieldError
from hybridkv.spec import DType, Split

_REQUIRED = object()
_LARGEST = 2**24  # no size in a config is larger; nonsense beyond it would only make arithmetic slow
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Config:
    """One model's text config, as seen from one tensor-parallel rank."""

    name: str
    model_type: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    rank: int = 0
    dtype: DType = DType.BFLOAT16
    kv_cache_dtype: DType = DType.BFLOAT16
    state_dtype: DType = DType.FLOAT32

    def get(self, *keys: str, default: Any = _REQUIRED) -> Any:
        """The first of `keys` the config sets; a null counts as set. Several keys: one field under several names."""
        for source in (self.values, self.defaults):
            for key in keys:
                if key in source:
                    return source[key]
        if default is not _REQUIRED:
            return default
        raise MissingFieldError(f"config of {self.name} ({self.model_type}) has no {keys[0]!r}: add it to config.json")

    def integer(self, *keys: str) -> int:
        """A positive integer."""
        return self._positive(keys[0], self.get(*keys))

    def optional_integer(self, *keys: str) -> int | None:
        """A positive integer, or None where the config says null or nothing."""
        value = self.get(*keys, default=None)
        return None if value is None else self._positive(keys[0], value)

    def optional_count(self, *keys: str) -> int:
        """An integer from 0 on; null or nothing is 0."""
        value = self.get(*keys, default=None)
        return 0 if value in (None, 0) else self._positive(keys[0], value)

    def integers(self, *keys: str) -> list[int]:
        """A list of integers from 0 on; null or nothing is an empty list."""
        value = self.get(*keys, default=None) or []
        if not isinstance(value, list) or any(not isinstance(x, int) or x < 0 for x in value):
            raise self._bad(keys[0], value, "a list of integers")
        return [int(x) for x in value]

    def strings(self, *keys: str) -> list[str] | None:
        """A list of strings, or None where the config says null or nothing."""
        value = self.get(*keys, default=None)
        if value is not None and (not isinstance(value, list) or any(not isinstance(x, str) for x in value)):
            raise self._bad(keys[0], value, "a list of strings")
        return value

    @property
    def num_layers(self) -> int:
        layers = self.integer("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise self._bad("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
        return layers

    def of_layer(self, layer: int, sizes: Mapping[str, Any]) -> Config:
        """The config as one layer reads it: with `sizes`, and with its entry of `per_layer_config` if there is one."""
        own = {**sizes, **self._per_layer.get(layer, {})}
        if own.pop("skip", None):
            raise ConfigError(
                f"config of {self.name}: per_layer_config lets layer {layer} skip a part of itself, which no model "
                f"here does; remove 'skip'"
            )
        return replace(self, values={**self.values, **own}) if own else self

    @property
    def has_per_layer_config(self) -> bool:
        """Whether the config says itself which sizes differ between layers."""
        return self.get("per_layer_config", default=None) is not None

    @property
    def _per_layer(self) -> dict[int, Mapping[str, Any]]:
        """transformers' `per_layer_config`: fields by layer; its keys are numbers, in JSON with leading zeros."""
        given = self.get("per_layer_config", default=None) or {}
        try:
            found = {int(layer): fields for layer, fields in given.items()}
        except (AttributeError, TypeError, ValueError):
            raise self._bad("per_layer_config", given, "an object with the fields of layers by number") from None
        for layer, fields in found.items():
            if not isinstance(fields, Mapping) or not 0 <= layer < self.num_layers:
                raise self._bad("per_layer_config", given, f"an object of fields for layers 0 to {self.num_layers - 1}")
        return found

    def quotient(self, total: int, key: str, what: str) -> int:
        """`total` divided by the field `key`, which must leave no rest."""
        parts = self.integer(key)
        if total % parts:
            raise ConfigError(
                f"config of {self.name}: {what} {total} cannot be divided by {key} {parts}; mend config.json"
            )
        return total // parts

    def even(self, total: int, what: str) -> Split:
        """This rank's equal part of `total`."""
        return Split.even(total, self.tp, self.rank, f"{what} of {self.name}")

    def replicated(self, total: int, what: str) -> Split:
        """This rank's part of `total`; the same unit on several ranks when there are fewer units than ranks."""
        return Split.replicated(total, self.tp, self.rank, f"{what} of {self.name}")

    def _positive(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise self._bad(key, value, f"a positive integer up to {_LARGEST}")
        return value

    def _bad(self, key: str, value: Any, expected: str) -> ConfigError:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        return ConfigError(f"config of {self.name} ({self.model_type}): {key!r} is {shown}, expected {expected}")
