"""What docs/cache.md says is so: the example of loads runs as it is printed, verbs are listed with their options."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from hybridkv.cache import IS_COMPILED, Cache

PAGE = (Path(__file__).parents[2] / "docs/cache.md").read_text(encoding="utf-8")


def test_the_example_of_loads_runs() -> None:
    section = PAGE.partition("\n## Loads\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    exec(compile(block, "docs/cache.md", "exec"), {})


@pytest.mark.skipif(IS_COMPILED, reason="compiled verbs have no signatures to look at")
def test_every_verb_has_its_options() -> None:
    for verb in ("begin", "extend", "commit", "pin"):
        (stated,) = re.findall(rf"^\| `{verb}\((.*?)\)`", PAGE, re.MULTILINE)
        own = [name for name in inspect.signature(getattr(Cache, verb)).parameters if name not in ("self", "lease")]
        listed = [word.strip(" =") for word in stated.split(",") if word.strip() != "lease"]
        assert ["num_tokens" if word == "n" else word for word in listed] == own, verb
