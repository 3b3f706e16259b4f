"""The test material itself: models that need what their caches hold, and are exact enough to compare with.

Only stock code runs here. A model that would not notice a lost state proves nothing about an engine.
"""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import torch

from tests.engine.zoo import FAMILIES, VOCAB_SIZE, build, family_config, make, oracle_logits, prompt, text_config

NOISE = 2e-5  # float32 logits may be off by this much
MATTERS = 1e-2  # what the cache holds moves logits by this much, at least
PROMPT_TOKENS = 150

every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Tiny matrices are slower on many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def last_logits(model: Any, *prompts: list[int], **inputs: Any) -> Any:
    """Logits [B, V] after prompts of one length."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor(prompts), use_cache=False, **inputs).logits[:, -1]


def changed(tokens: list[int], *positions: int) -> list[int]:
    """`tokens` with another token at each of `positions`."""
    return [token % (VOCAB_SIZE - 5) + 5 if i in positions else token for i, token in enumerate(tokens)]


def moved(a: Any, b: Any) -> float:
    return float((a - b).abs().max())


@every_family
def test_every_family_is_its_own_model(name: str) -> None:
    model = build(name)
    assert text_config(model).model_type == FAMILIES[name].model_type
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert build(name) is model


@every_family
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    tokens = prompt(8)
    again = make(family_config(name), branch_scale=FAMILIES[name].branch_scale)
    assert moved(oracle_logits(build(name), tokens), oracle_logits(again, tokens)) == 0
    assert moved(oracle_logits(build(name), tokens), oracle_logits(build(name, seed=1), tokens)) > MATTERS


@every_family
def test_float32_agrees_with_float64(name: str) -> None:
    exact = copy.deepcopy(build(name)).double()
    exact.set_experts_implementation("eager")  # the grouped kernel knows no float64
    tokens = prompt(PROMPT_TOKENS)
    assert moved(oracle_logits(build(name), tokens), oracle_logits(exact, tokens)) < NOISE


@every_family
def test_logits_are_spread_and_the_best_token_stands_out(name: str) -> None:
    logits = oracle_logits(build(name), prompt(PROMPT_TOKENS))
    best, second = logits.topk(2).values.unbind(-1)
    assert 1 < float(logits.std()) < 3
    assert float(((best - second) > 100 * NOISE).float().mean()) > 0.95


@every_family
def test_tokens_far_back_matter(name: str) -> None:
    tokens = prompt(PROMPT_TOKENS)
    variants = [changed(tokens, position) for position in (0, 50, 100)]
    base, *others = last_logits(build(name), tokens, *variants)
    assert min(moved(base, other) for other in others) > MATTERS


@every_family
def test_the_order_of_tokens_matters(name: str) -> None:
    tokens = prompt(PROMPT_TOKENS)
    base, swapped = last_logits(build(name), tokens, [*tokens[:3], tokens[4], tokens[3], *tokens[5:]])
    assert moved(base, swapped) > MATTERS


@every_family
def test_position_ids_matter_where_there_are_rotary_positions(name: str) -> None:
    tokens, positions = prompt(PROMPT_TOKENS), torch.arange(PROMPT_TOKENS)[None]
    gap = positions + (positions >= PROMPT_TOKENS - 8)  # inside every window
    # Without a mask, transformers takes a gap for the start of another sequence.
    everything = torch.ones_like(positions)
    shifted = last_logits(build(name), tokens, position_ids=gap, attention_mask=everything)
    difference = moved(last_logits(build(name), tokens), shifted)
    assert difference > MATTERS if FAMILIES[name].rotary else difference < NOISE


# What the cache holds, dropped between prompt and reply. Tokens of the reply go in one by one: stock Jamba starts
# anew with each chunk of several tokens.
_PARTS = {"attention": ("keys", "values"), "recurrent": ("recurrent_states",), "conv": ("conv_states",)}
REPLY_TOKENS = 12


def _tensors_of(cache: Any, part: str) -> list[Any]:
    if part == "recurrent" and hasattr(cache, "linear_cache"):  # MiniMax keeps its own list
        return [state for state in cache.linear_cache if torch.is_tensor(state)]
    held: list[Any] = [getattr(layer, name, None) for layer in cache.layers for name in _PARTS[part]]
    flat: list[Any] = [tensor for entry in held for tensor in (entry.values() if isinstance(entry, dict) else [entry])]
    return [tensor for tensor in flat if torch.is_tensor(tensor) and tensor.numel()]


def reply_logits(model: Any, tokens: list[int], drop: str | None) -> Any:
    """Logits [REPLY_TOKENS, V] of the last tokens, one by one on a cache of which `drop` was zeroed before them."""
    accepted = inspect.signature(model.forward).parameters
    cache_name = next(name for name in ("past_key_values", "cache_params") if name in accepted)
    prompt_tokens = len(tokens) - REPLY_TOKENS
    ids, logits = torch.tensor([tokens]), []
    with torch.inference_mode():
        cache = model(input_ids=ids[:, :prompt_tokens], use_cache=True)[cache_name]
        dropped = _tensors_of(cache, drop) if drop else []
        assert bool(dropped) == bool(drop)
        for tensor in dropped:
            tensor.zero_()
        for i in range(prompt_tokens, len(tokens)):
            step = {"position_ids": torch.tensor([[i]]), cache_name: cache}  # stock Bamba counts from 0 by itself
            logits.append(model(input_ids=ids[:, i : i + 1], use_cache=True, **step).logits[0, -1])
    return torch.stack(logits)


@every_family
def test_the_stock_cache_agrees_with_the_oracle(name: str) -> None:
    tokens = prompt(80)
    cached = reply_logits(build(name), tokens, drop=None)
    assert moved(cached, oracle_logits(build(name), tokens)[-REPLY_TOKENS:]) < NOISE


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, family in FAMILIES.items() for part in _PARTS if getattr(family, part)]
)
def test_every_part_of_a_cache_matters(name: str, part: str) -> None:
    tokens = prompt(80)
    difference = (
        reply_logits(build(name), tokens, drop=part) - oracle_logits(build(name), tokens)[-REPLY_TOKENS:]
    ).abs()
    assert float(difference[0].max()) > 10 * MATTERS
    assert float(difference[-1].max()) > MATTERS


# One layer of one kind alone: only its own past reaches the logits.
def _only_layer(name: str, layer_type: str) -> Any:
    alone = {"num_hidden_layers": 1, "layer_types": [layer_type], "num_kv_shared_layers": 0}
    alone["num_attention_heads_per_layer"] = None
    config = family_config(name, **alone)
    config.layer_types = [layer_type]  # Gemma 4 makes full attention of the last layer
    return make(config, branch_scale=FAMILIES[name].branch_scale)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.window])
def test_a_window_ends_where_it_says(name: str) -> None:
    window, tokens = FAMILIES[name].window, prompt(60)
    assert window
    variants = [changed(tokens, 59 - (window - 1)), changed(tokens, 59 - window)]
    model = _only_layer(name, "sliding_attention")
    # One by one: rows of one narrow product differ by their last bits, depending on their place.
    base, inside, outside = (last_logits(model, one) for one in (tokens, *variants))
    assert moved(base, inside) > 1e-3
    assert moved(base, outside) == 0


def test_a_chunk_ends_where_it_says() -> None:
    tokens = prompt(60)
    model = _only_layer("llama4", "chunked_attention")
    base, inside, outside = last_logits(model, tokens, changed(tokens, 40), changed(tokens, 39))
    assert moved(base, inside) > 1e-3
    assert moved(base, outside) == 0


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.window or family.chunk])
def test_windows_mix_with_full_attention(name: str) -> None:
    assert {"full_attention"} < set(text_config(build(name)).layer_types)


def test_llama4_changes_temperature_at_small_positions() -> None:
    tokens, scale = prompt(40), FAMILIES["llama4"].overrides["floor_scale"]
    assert 0 in build("llama4").config.no_rope_layers
    lukewarm = make(family_config("llama4", attn_temperature_tuning=False))
    difference = (oracle_logits(build("llama4"), tokens) - oracle_logits(lukewarm, tokens)).abs().amax(-1)
    assert float(difference[: scale - 1].max()) < NOISE
    assert float(difference[scale:].min()) > 1e-4
    assert float(difference[-1]) > MATTERS


def test_gemma_shares_kv_and_zamba2_shares_attention_weights() -> None:
    for name in ("gemma3n", "gemma4"):
        assert 0 < build(name).config.num_kv_shared_layers < build(name).config.num_hidden_layers
    hybrids = [layer for layer in build("zamba2").model.layers if hasattr(layer, "shared_transformer")]
    first, second = (layer.shared_transformer.self_attn.q_proj.weight for layer in hybrids)
    assert first is second


def test_gpt_oss_sinks_matter() -> None:
    model, tokens = copy.deepcopy(build("gpt_oss")), prompt(30)
    before = last_logits(model, tokens)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-100.0)
    assert moved(before, last_logits(model, tokens)) > MATTERS


def test_layers_differ_in_sizes() -> None:
    """Query heads, KV heads, or the sizes of keys and values; and some have sinks."""
    found = {}
    for name in ("mimo_v2_flash", "laguna", "step3p5", "gemma4", "gemma4_experts"):
        modules = [layer.self_attn for layer in build(name).get_decoder().layers]
        found[name] = len({(m.head_dim, m.num_key_value_groups) for m in modules})
    assert found == {"mimo_v2_flash": 2, "laguna": 2, "step3p5": 2, "gemma4": 2, "gemma4_experts": 2}
    assert {m.self_attn.sinks is None for m in build("mimo_v2_flash").model.layers} == {True, False}


def _routed(model: Any, tokens: list[int]) -> list[Any]:
    """Expert indices [T, top k] of every router, found where routers hand them to the experts."""
    chosen: list[Any] = []

    def keep(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tensors = [*arguments, *keywords.values()]
        chosen.extend(t for t in tensors if torch.is_tensor(t) and t.dtype == torch.int64)

    hooks = [
        m.register_forward_pre_hook(keep, with_kwargs=True) for n, m in model.named_modules() if n.endswith("experts")
    ]
    last_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return chosen


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.experts and name != "llama4"])
def test_every_router_uses_several_experts_and_leaves_some_out(name: str) -> None:
    routes = _routed(build(name), prompt(PROMPT_TOKENS))
    assert routes
    for indices in routes:
        assert len(indices.unique()) >= 4
        assert indices.shape[-1] == 2


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.experts])
def test_it_matters_which_expert_is_chosen(name: str) -> None:
    model, tokens = copy.deepcopy(build(name)), prompt(PROMPT_TOKENS)
    for weight_name, weight in model.named_parameters():
        if re.search(r"(?<!shared_)experts\.", weight_name):
            weight.data.copy_(weight.data.roll(1, dims=0))
    difference = (oracle_logits(model, tokens) - oracle_logits(build(name), tokens)).abs().amax(-1)
    assert float(difference.min()) > MATTERS
