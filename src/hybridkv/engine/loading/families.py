"""Model types that the engine runs. Unknown ones are refused: wrong output would not be noticed."""

from __future__ import annotations

import transformers

from hybridkv.errors import ConfigError
from hybridkv.models.families.unknown import family_of
from hybridkv.models.family import FAMILIES

SUPPORTED = frozenset(name for name, family in FAMILIES.items() if not family.plan_only)
"""Model types of language models, each compared with the stock model by the tests."""
COMPILED = frozenset(name for name in SUPPORTED if FAMILIES[name].compiles)
"""Model types whose compiled layers the tests compare with the stock model."""


def check_supported(model_type: str, name: str) -> None:
    """Refuse a model type that the engine does not run, or not with the installed transformers."""
    family = family_of(model_type)
    if model_type not in SUPPORTED:
        raise ConfigError(
            f"{name} is of type {model_type!r}, which the engine does not run: {family.plan_only}; "
            f"it runs {', '.join(sorted(SUPPORTED))}"
        )
    if not family.is_in(transformers.__version__):
        raise ConfigError(
            f"{name} is of type {model_type!r}, which needs transformers {family.since} or newer: "
            f"version {transformers.__version__} is installed, upgrade it"
        )
