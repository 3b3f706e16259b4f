"""Tiny checkpoints on disk: both halves load offline, and say what the model in memory says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hybridkv import Engine
from hybridkv.engine.loading import model_files
from hybridkv.engine.loading.checkpoint import load
from hybridkv.errors import ConfigError
from hybridkv.models import load_model
from hybridkv.models.family import FAMILIES
from tests.engine.checkpoints import save_checkpoint, tokenizer
from tests.engine.composites import COMPOSITE_ONLY, COMPOSITES, build_composite, no_timm
from tests.engine.drive import GREEDY
from tests.engine.reference import by_torch
from tests.engine.zoo import ALL, KIN, VOCAB_SIZE, build, family_config, fresh, make, oracle_logits, prompt
from tests.tiny import auto_class

NOISE = 2e-5


def moved(a: Any, b: Any) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_checkpoint_loads_with_its_language_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, DynamicCache

    save_checkpoint(name, tmp_path, composite=True)
    with no_timm():
        auto = auto_class(AutoConfig.from_pretrained(tmp_path))
        loaded = by_torch(auto.from_pretrained(tmp_path, dtype=torch.float32).eval())
    tokens = prompt(40)
    with torch.inference_mode():
        kept = loaded(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(40)[None],
            past_key_values=DynamicCache(config=loaded.config),
            use_cache=False,
            logits_to_keep=torch.tensor([7, 39]),
        ).logits[0]
    assert moved(kept, oracle_logits(build_composite(name), tokens)[[7, 39]]) < NOISE


@pytest.mark.parametrize(
    "config", [{"model_type": "gemma3_text"}, {"model_type": "gemma3"}, {"model_type": "gemma3", "text_config": {}}]
)
def test_a_transformers_without_the_model_is_named(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "gemma3_text", replace(FAMILIES["gemma3_text"], since="99.1"))
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)  # it would find no class, and not say why
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = r"'gemma3_text', which needs transformers 99\.1 or newer: version 5\.\S+ is installed, upgrade it"
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path)


@pytest.mark.parametrize("name", [*COMPOSITES, *COMPOSITE_ONLY])
def test_an_engine_serves_the_text_of_a_composite_checkpoint(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path, composite=True)
    assert load_model(tmp_path).model_type == ALL[name].model_type
    with no_timm():
        engine = Engine(
            tmp_path, memory="16MiB", device="cpu", dtype="float32", max_num_batched_tokens=40, max_num_seqs=8
        )
    with engine:
        tokens = prompt(90)
        replies = [engine.generate(tokens, GREEDY, progress=False)[0] for _ in range(2)]
    logits = oracle_logits(build_composite(name), tokens + replies[0].token_ids)
    assert replies[0].token_ids == replies[1].token_ids == logits[89:-1].argmax(-1).tolist()
    assert replies[1].cached_tokens == 80


@pytest.mark.parametrize("name", KIN)
def test_an_engine_loads_a_checkpoint_of_each_kin(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    with Engine(tmp_path, memory="16MiB", device="cpu", dtype="float32", max_num_seqs=8) as engine:
        [reply] = engine.generate(prompt(50), GREEDY, progress=False)
    logits = oracle_logits(build(name), prompt(50) + reply.token_ids)
    assert reply.token_ids == logits[49:-1].argmax(-1).tolist()


def test_an_engine_serves_the_thinker_of_an_omni_checkpoint(tmp_path: Path) -> None:
    """The weights of the talker are in the files, too; they are left there."""
    thinker = build("qwen3_omni_moe")
    thinker.save_pretrained(tmp_path)
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file({**weights, "talker.model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors", {"format": "pt"})
    inner = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "thinker_config": inner}))
    assert load_model(tmp_path).model_type == "qwen3_omni_moe_text"
    with Engine(tmp_path, memory="16MiB", device="cpu", dtype="float32") as engine:
        said = engine.generate(prompt(40), GREEDY, progress=False)[0].token_ids
    assert said == oracle_logits(thinker, prompt(40) + said)[39:-1].argmax(-1).tolist()


def test_mistral_with_layer_types_is_a_ministral(tmp_path: Path) -> None:
    fresh("ministral").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "ministral"', '"model_type": "mistral"'))
    loaded = load(tmp_path, device="cpu", dtype="float32")
    assert type(loaded.model).__name__ == "MinistralForCausalLM"
    assert load_model(tmp_path).layers == loaded.spec.layers == load(fresh("ministral"), device="cpu").spec.layers
    types = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(ConfigError, match=r"MistralForCausalLM does not read: load it from a directory"):
        load(make(family_config("mistral", layer_types=types, sliding_window=20)), device="cpu")


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "zamba2"])
def test_a_checkpoint_loads_as_it_was(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_checkpoint(name, tmp_path)
    loaded = by_torch(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    tokens = prompt(30)
    assert moved(oracle_logits(loaded, tokens), oracle_logits(build(name), tokens)) < NOISE


def test_the_tokenizer_loads_and_speaks_chat(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_checkpoint("llama", tmp_path)
    loaded, config = AutoTokenizer.from_pretrained(tmp_path), build("llama").config
    text = "Grüße, state 7!\n"
    assert loaded.decode(loaded.encode(text)) == text
    assert len(loaded) <= VOCAB_SIZE
    assert (loaded.bos_token_id, loaded.eos_token_id) == (config.bos_token_id, config.eos_token_id)
    chat = loaded.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.encode(chat).count(loaded.eos_token_id) == 1
    assert tokenizer().encode(chat) == loaded.encode(chat)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_is_computed_where_the_cpu_can(
    has_bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(model_files, "has_bfloat16", lambda: has_bfloat16)
    assert load(tmp_path, device="cpu").model.dtype == (torch.bfloat16 if has_bfloat16 else torch.float32)
    assert load(tmp_path, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16
