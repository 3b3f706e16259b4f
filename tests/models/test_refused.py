"""Model types with a past of an unknown kind: refused by name, for what they keep."""

from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING

from hybridkv.engine.loading.families import check_supported
from hybridkv.errors import ConfigError
from hybridkv.models import read_compute, read_config
from hybridkv.models.families.refused import REFUSED
from hybridkv.models.family import FAMILIES
from hybridkv.models.reader import open_config


def test_no_type_is_both_read_and_refused() -> None:
    assert not set(REFUSED) & set(FAMILIES)


@pytest.mark.parametrize("model_type", sorted(REFUSED))
@pytest.mark.parametrize("suffix", ["", "_text"])
def test_the_refusal_names_what_is_kept(model_type: str, suffix: str) -> None:
    message = f"m is of type '{model_type}{suffix}'.* {REFUSED[model_type]}, which hybridkv does not know yet"
    for config in (
        {"model_type": model_type + suffix},
        {"model_type": "foo", "text_config": {"model_type": model_type}},
    ):
        with pytest.raises(ConfigError, match=message if config["model_type"] != "foo" else REFUSED[model_type]):
            read_config(config, name="m")


@pytest.mark.parametrize("model_type", sorted(set(REFUSED) & set(CONFIG_MAPPING)))
def test_configs_of_transformers_are_refused(model_type: str) -> None:
    config = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    for read in (read_config, read_compute, open_config):
        with pytest.raises(ConfigError, match=f"{REFUSED[model_type]}, which hybridkv does not know yet"):
            read(config, name="m")


def test_an_outer_type_is_refused_whatever_it_holds() -> None:
    with pytest.raises(ConfigError, match="minimax_m3_vl keeps index keys"):
        read_config({"model_type": "minimax_m3_vl", "text_config": {"model_type": "llama"}}, name="m")


def test_the_engine_refuses_types_without_a_record() -> None:
    with pytest.raises(ConfigError, match=r"m is of type 'foo', which the engine does not run: hybridkv has no record"):
        check_supported(open_config({"model_type": "foo"}, "m").model_type, "m")
