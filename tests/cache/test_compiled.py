"""A compiled core is compiled throughout: no module of it is left to the interpreter."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import hybridkv.cache
from hybridkv.cache import IS_COMPILED


@pytest.mark.skipif(not IS_COMPILED, reason="not compiled")
def test_every_module_is_compiled() -> None:
    found = pkgutil.walk_packages(hybridkv.cache.__path__, "hybridkv.cache.")
    modules = {"hybridkv.sight", *(module.name for module in found if not module.ispkg)}
    assert len(modules) > 30
    interpreted = {name for name in modules if str(importlib.import_module(name).__file__).endswith(".py")}
    assert not interpreted
