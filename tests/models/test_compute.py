"""What tokens cost, against the real models' parameters and the FLOPs torch counts, and against published figures."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hybridkv.errors import ConfigError
from hybridkv.models import catalogue, compute_of, read_compute
from hybridkv.models.compute import Attention, Compute
from hybridkv.sight import Sight
from tests.tiny import TINY, auto_class, config_class, tiny_config

NUM_TOKENS = 48
# torch's own code multiplies exactly what we count: neither chunked state kernels nor experts nobody asked for.
EXACT = sorted(
    set(TINY)
    - {"gemma3n_text", "llama4_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"}
    - {"minimax", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h", "zamba2", "mamba2", "bailing_hybrid"}
)
MODELS = {
    "windows": Compute("m", 100, 200, 10, 7, (Attention(3), Attention(5, Sight(window=8))), "config"),
    "chunks": Compute("m", 100, 200, 10, 0, (Attention(3, Sight(chunk=8)),), "config"),
}


def tiny_model(model_type: str) -> Any:
    torch.manual_seed(0)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = tiny_config(model_type)
    model = auto_class(config).from_config(config, **options).eval().float()
    for name in (
        "visual",
        "audio_tower",
        "vision_tower",
        "vision_model",
        "multi_modal_projector",
        "vision_adapter",
        "vision_projection",
    ):  # of composite models: not our text's
        if hasattr(model, "model") and hasattr(model.model, name):
            delattr(model.model, name)
    return model


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_parameters_are_those_of_the_real_model(model_type: str) -> None:
    """We leave out norms and biases, which weigh more in a tiny model than in any published one."""
    model = tiny_model(model_type)
    compute = read_compute(model.config.to_dict(), name=model_type)
    assert compute.total_parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    assert compute.active_parameters == pytest.approx(real_active_parameters(model), rel=0.02)
    assert compute.source == "config"


def real_active_parameters(model: Any) -> int:
    """Without embeddings, of the experts those that one token is routed to, and shared blocks each time they run."""
    active, adapters = 0, set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if re.search(r"embed(dings|_tokens|_tokens_per_layer)\.weight", name):
            continue
        if "adapter_list" in name:  # named again in each layer, but each is for one
            if id(parameter) in adapters:
                continue
            adapters.add(id(parameter))
        experts = parameter.shape[0] if ".experts." in name else 1
        active += (
            parameter.numel()
            // experts
            * (min(experts, model.config.get_text_config().num_experts_per_tok) if experts > 1 else 1)
        )
    return active


@pytest.mark.parametrize("model_type", EXACT)
def test_flops_of_a_prompt_are_those_torch_counts(model_type: str) -> None:
    """Matrix products and convolutions. torch runs the head for every token, and scores every pair, masked or not."""
    compute = read_compute(tiny_config(model_type).to_dict(), name=model_type)
    ours = compute.flops(0, NUM_TOKENS) - compute.state_flops * NUM_TOKENS
    ours += 2 * compute.head_parameters * (NUM_TOKENS - 1)
    ours += sum(kind.pair_flops * (NUM_TOKENS**2 - kind.sight.num_pairs(NUM_TOKENS)) for kind in compute.attention)
    assert ours == pytest.approx(flops_of_prompt(model_type), rel=0.01)


@pytest.mark.parametrize(("model_type", "at_most"), [("qwen3_next", 1.6), ("olmo_hybrid", 1.5), ("minimax", 1.2)])
def test_flops_of_states_are_of_the_order_torch_counts(model_type: str, at_most: float) -> None:
    """States are updated a chunk at a time there: more FLOPs, on larger matrices, than an update a token."""
    compute = read_compute(tiny_config(model_type).to_dict(), name=model_type)
    assert 1 <= flops_of_prompt(model_type) / compute.flops(0, NUM_TOKENS) <= at_most


def flops_of_prompt(model_type: str) -> int:
    model = tiny_model(model_type)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(NUM_TOKENS)[None] % model.config.get_text_config().vocab_size)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("compute", [*MODELS.values(), compute_of("gemma-3-4b"), compute_of("qwen3.5-0.8b")])
def test_flops_add_up_and_grow(compute: Compute) -> None:
    head = 2 * compute.head_parameters
    ends = [1, 2, 7, 8, 9, 16, 17, 1000, 4096, 5000]
    totals = [compute.flops(0, end) for end in ends]
    assert totals == sorted(set(totals))
    for start in ends:
        for end in (end for end in ends if end > start):
            assert compute.flops(0, start) + compute.flops(start, end) - head == compute.flops(0, end)
            assert head < compute.flops(start, end) < compute.flops(0, end)
    assert compute.flops(9, 9) == 0


def test_impossible_ranges_are_refused() -> None:
    for start, end in ((-1, 4), (5, 4)):
        with pytest.raises(ConfigError, match="expected 0 <= start <= end"):
            MODELS["chunks"].flops(start, end)


# What a config must give, because its class has no default that makes a model.
NEEDED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "qwen3_omni_moe_text": {"head_dim": 128},
}


@pytest.mark.parametrize("model_type", sorted(set(TINY) - {"deepseek_v2", "lfm2_moe", "nemotron_h"}))
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    given = NEEDED.get(model_type, {})
    silent = read_compute({"model_type": model_type, **given}, name="m")
    assert silent == read_compute(config_class(model_type)(**given).to_dict(), name="m")


@pytest.mark.parametrize("name", sorted(name for name, entry in catalogue().items() if entry.verified_by))
def test_verified_entries_are_the_defaults_of_a_config_class(name: str) -> None:
    config = getattr(transformers, catalogue()[name].verified_by or "")()
    assert compute_of(name) == read_compute(config.to_dict(), name=name)
    assert compute_of(name) == read_compute(catalogue()[name].config, name=name, use_defaults=False)


# Some names of Gemma leave the embeddings out, Llama and Ministral round down, Mixtral counts one expert.
_OTHER_NUMBERS = {"gemma-2-2b", "gemma-3n-e2b", "gemma-3n-e4b", "llama-3.2-1b", "ministral-3-3b", "mixtral-8x22b-v0.1"}


@pytest.mark.parametrize("name", sorted(set(catalogue()) - _OTHER_NUMBERS))
def test_entries_have_the_parameters_their_names_tell(name: str) -> None:
    """Names without a number tell nothing."""
    compute = compute_of(name)
    assert compute.source == "config"
    total = re.search(r"(?<![a-z])(\d+(?:\.\d+)?)b(?!-\d+e)", name)
    if total:
        assert compute.total_parameters == pytest.approx(float(total[1]) * 1e9, rel=0.11)
    if active := re.search(r"-a(\d+)b", name):
        embedded = compute.active_parameters + compute.head_parameters  # most count the embeddings in
        assert compute.active_parameters < (int(active[1]) + 1) * 1e9
        assert embedded > (int(active[1]) - 0.5) * 1e9


@pytest.mark.parametrize(
    ("name", "active", "total"),
    [
        ("deepseek-v3", 37, 671),
        ("gpt-oss-120b", 5.1, 116.8),
        ("minimax-text-01", 45.9, 456),
        ("jamba-1.5-large", 94, 398),
        ("llama-4-maverick-17b-128e", 17, 400),
        ("granite-4.0-h-small", 9, 32),
        ("nemotron-3-super-120b-a12b", 12, 120.6),
        ("nemotron-3-ultra-550b-a55b", 55, 549),
        ("kimi-k2", 32, 1026),
        ("glm-4.5", 32, 355),
        ("minimax-m2", 10, 230),
        ("step-3.5-flash", 11, 196),
        ("llama-3.2-1b", 1.24, 1.24),
        ("mixtral-8x7b-v0.1", 12.9, 46.7),
        ("mixtral-8x22b-v0.1", 39, 141),
    ],
)
def test_published_parameters(name: str, active: float, total: float) -> None:
    compute = compute_of(name)
    assert compute.active_parameters == pytest.approx(active * 1e9, rel=0.06)
    assert compute.total_parameters == pytest.approx(total * 1e9, rel=0.02)


def test_a_record_without_sizes_falls_back_on_its_name() -> None:
    config = {key: value for key, value in catalogue()["qwen3.5-397b-a17b"].config.items() if key != "num_experts"}
    compute = read_compute(config, name="qwen3.5-397b-a17b", use_defaults=False)
    assert (compute.active_parameters, compute.total_parameters, compute.source) == (17e9, 397e9, "name")
    assert compute.attention == compute_of("qwen3.5-397b-a17b").attention
    assert read_compute(config, name="gemma-e4b", use_defaults=False).total_parameters == 4e9
    with pytest.raises(ConfigError, match=r"a token of my-model costs .* 'num_experts'.* pass --prefill-rate"):
        read_compute(config, name="my-model", use_defaults=False)


def test_nonsense_is_refused_rather_than_estimated() -> None:
    with pytest.raises(ConfigError, match="'vocab_size' is 'many'"):
        read_compute({"model_type": "llama", "vocab_size": "many"}, name="llama-8b")
    with pytest.raises(ConfigError, match="moe_layers_enum is '3,x', expected numbers of layers with commas between"):
        read_compute({"model_type": "step3p5", "moe_layers_enum": "3,x"}, name="m")
