"""Compiles the cache core to C while a wheel is built, if asked to: HYBRIDKV_COMPILE=1 pip install hybridkv.

The same sources, through mypyc: nothing behaves differently, it only takes less time. It happens in a copy, so that
no compiled file is left beside the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ASK = "HYBRIDKV_COMPILE"
SETUP = """
import sys
from setuptools import setup
from mypyc.build import mypycify
checks = ["--follow-imports=silent", "--ignore-missing-imports"]
setup(name="core", packages=[], ext_modules=mypycify([*checks, *sys.argv[3:]], group_name="hybridkv_core"),
      script_args=sys.argv[1:3])
"""


class CompileCore(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"
    _copy: Path | None = None

    def dependencies(self) -> list[str]:
        return ["mypy==2.4.1", "numpy", "setuptools"] if self._is_asked_for() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._is_asked_for() or version == "editable":
            return
        copy = self._copy = Path(tempfile.mkdtemp(prefix="hybridkv-core-"))
        shutil.copytree(Path(self.root, "src/hybridkv"), copy / "hybridkv")
        (copy / "hybridkv/__init__.py").write_text("")  # it leads to the engine, and that to torch
        (copy / "setup.py").write_text(SETUP)
        sources = [copy / "hybridkv/sight.py", *(copy / "hybridkv/cache").rglob("[!_]*.py")]
        modules = sorted(path.relative_to(copy) for path in sources)
        command = [sys.executable, "setup.py", "build_ext", "--inplace", *map(str, modules)]
        done = subprocess.run(command, cwd=copy, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            shutil.rmtree(copy)
            raise RuntimeError(f"the cache core could not be compiled; without {ASK} it need not be:\n{done.stdout}")
        for built in copy.rglob("*.so"):
            build_data["force_include"][str(built)] = str(built.relative_to(copy))
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._copy is not None:
            shutil.rmtree(self._copy)

    def _is_asked_for(self) -> bool:
        return self.target_name == "wheel" and os.environ.get(ASK, "0") not in ("", "0")
