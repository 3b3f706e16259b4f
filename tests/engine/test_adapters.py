"""Requests with adapters, beside others and without: every logit is that of peft's model run alone in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridkv import Engine, SamplingParams
from hybridkv.engine.loading.packing import PackedLinear, pack_weights
from hybridkv.errors import ConfigError, InputError, RequestError
from hybridkv.link.link import LinkOptions
from tests.engine.drive import GREEDY, Driver, check_greedy, memory_for
from tests.engine.lora import directories, linear_layers, save_adapter, two_adapters
from tests.engine.test_hidden_states import check as check_hidden_states
from tests.engine.zoo import FAMILIES, build, fresh, oracle_logits, prompt

KINDS = ["llama", "gemma3", "qwen3_next", "falcon_h1", "deepseek_v3"]
"""Full attention, windows, a delta rule with experts, Mamba-2 beside attention, latents that a layer expands."""
NAMES = (None, "sql", "chat")
kinds = pytest.mark.parametrize("family", KINDS)


def driver_of(family: str, **options: Any) -> Driver:
    return Driver(build(family), adapters=two_adapters(family), **options)


def ends_well(driver: Driver) -> dict[str, int]:
    """Run to the end, check greedy tokens; returns cached tokens by request."""
    results = driver.run()
    for name in results:
        check_greedy(driver, name)
    driver.cache.reset()
    driver.cache.check_integrity()
    assert not any(driver.cache.pages_in_use().values())
    return {name: result.cached_tokens for name, result in results.items()}


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_all_layers_beside_each_other_and_none(family: str) -> None:
    driver = driver_of(family, max_num_batched_tokens=48)
    for name in NAMES:
        driver.add(f"long {name}", prompt(70, 1), replace(GREEDY, max_tokens=4), adapter=name)
    driver.add("short", prompt(5, 2), replace(GREEDY, max_tokens=12), adapter="sql")
    for _ in range(2):
        driver.step()
    driver.add("late", prompt(33, 3), adapter="chat")
    assert set(ends_well(driver).values()) == {0}  # the same prompt, and nothing is shared
    stock, *adapted = (oracle_logits(driver.models[name], prompt(70, 1)) for name in NAMES)
    assert all(float((one - stock).abs().max()) > 0.1 for one in adapted)


@kinds
def test_a_prompt_sent_again_resumes_from_its_own_adapter(family: str) -> None:
    driver = driver_of(family)
    driver.add("first sql", prompt(100, 1), adapter="sql")
    driver.add("first chat", prompt(100, 1), adapter="chat")
    driver.run()
    for adapter in NAMES:
        driver.add(f"again {adapter}", prompt(100, 1), adapter=adapter)
    cached = ends_well(driver)
    assert [cached[f"again {adapter}"] for adapter in NAMES] == [0, 96, 96]


@kinds
def test_siblings_at_once_wait_only_for_their_own_adapter(family: str) -> None:
    driver = driver_of(family, max_num_batched_tokens=512)
    for index in range(6):
        driver.add(str(index), prompt(64, 1) + prompt(20, 10 + index), adapter=NAMES[index % 3])
    assert sorted(ends_well(driver).values()) == [0, 0, 0, 64, 64, 64]


@kinds
def test_preemption_and_eviction(family: str) -> None:
    driver = driver_of(family, memory_bytes=memory_for(build(family), 2, 140), max_num_batched_tokens=40)
    for index in range(6):
        driver.add(
            str(index), prompt(60 + 7 * index, index % 2), replace(GREEDY, max_tokens=34), adapter=NAMES[index % 3]
        )
    ends_well(driver)
    assert driver.core.scheduler.preempted or driver.cache.stats.blocks_evicted


@kinds
def test_samples_part_after_the_prompt(family: str) -> None:
    driver = driver_of(family)
    params = SamplingParams(n=3, temperature=1.5, max_tokens=10, ignore_eos=True, seed=7)
    driver.add("n", prompt(45, 1), params, adapter="sql")
    driver.add("beside", prompt(45, 1))
    result = driver.run()["n"]
    assert len({tuple(one.token_ids) for one in result.completions}) == 3


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_steps_with_an_adapter_do_not_decode_as_graphs(family: str) -> None:
    driver = driver_of(family, decodes="packed")
    driver.add("plain", prompt(20, 1), replace(GREEDY, max_tokens=20))
    for _ in range(5):
        driver.step()
    assert driver.core.captured_steps
    driver.add("sql", prompt(20, 2), replace(GREEDY, max_tokens=6), adapter="sql")
    while "sql" not in driver.results:
        driver.step()
        assert driver.core._launched is None or "sql" in driver.results
    before = driver.core.captured_steps
    ends_well(driver)
    assert driver.core.captured_steps > before


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_hidden_states_are_those_of_the_adapter(family: str) -> None:
    driver = driver_of(family)
    params = replace(GREEDY, hidden_layers=(0, 1, "final"), hidden_tokens="all")
    for name in NAMES:
        driver.add(str(name), prompt(40, 1), params, adapter=name)
    results = driver.run()
    for name in NAMES:
        model = driver.models[name] if name is None else driver.models[name].get_base_model()
        [one] = results[str(name)].completions
        tokens = results[str(name)].prompt_token_ids + one.token_ids[:-1]
        check_hidden_states(model, tokens, results[str(name)].hidden_layers, one.hidden_states)


def test_packed_weights_keep_their_adapters() -> None:
    model = fresh("llama")
    pack_weights(model)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    check_logprobs(model, "llama", directories("llama"), "sql", two_adapters("llama")["sql"][1])


def check_logprobs(model: Any, family: str, places: Any, name: str, oracle: Any) -> None:
    """Greedy tokens of an engine have the logprobs of peft's model, and not those of the stock model."""
    params = replace(GREEDY, logprobs=0)
    with Engine(model, memory="16MiB", device="cpu", adapters=places) as engine:
        [result] = engine.generate(prompt(50, 1), params, adapter=name, progress=False)
    assert result.logprobs is not None
    found = torch.tensor([one.chosen for one in result.logprobs])
    rows = [
        oracle_logits(one, result.prompt_token_ids + result.token_ids).log_softmax(-1)[49:-1]
        for one in (oracle, build(family))
    ]
    expected, stock = (row.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0] for row in rows)
    assert float((found - expected).abs().max()) <= 1e-4
    assert float((found - stock).abs().max()) > 0.05


# --- what peft saves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "r": 16, "lora_alpha": 3},
        {"target_modules": r".*\.(k|v)_proj", "use_rslora": True},
        {"target_modules": ["o_proj"], "layers_to_transform": [1]},
        {
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "use_rslora": True,
            "rank_pattern": {"v_proj": 2, r"layers\.0\.mlp\.up_proj": 7},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 33},
        },
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*", "lora_dropout": 0.5},
    ],
    ids=lambda config: " ".join(config),
)
def test_configurations(config: dict[str, Any], tmp_path: Path) -> None:
    oracle = save_adapter(build("llama"), tmp_path, 3, **config)
    check_logprobs(fresh("llama"), "llama", {"one": tmp_path}, "one", oracle)


def test_an_adapter_of_the_model_as_a_part_of_another(tmp_path: Path) -> None:
    """Where a model also sees, its language model has another place in it."""
    place, oracle = two_adapters("llama")["sql"]
    config = json.loads((place / "adapter_config.json").read_text())
    config["target_modules"] = sorted({path.rpartition(".")[2] for path in config["target_modules"]})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(place / "adapter_model.safetensors")
    moved = {name.replace(".model.layers.", ".model.language_model.layers."): one for name, one in tensors.items()}
    assert moved.keys().isdisjoint(tensors)
    save_file(moved, tmp_path / "adapter_model.safetensors")
    check_logprobs(fresh("llama"), "llama", {"one": tmp_path}, "one", oracle)


def test_layers_whose_weights_are_read_elsewhere(tmp_path: Path) -> None:
    """peft trains them in vain: an adapter that has not changed them is served."""
    model = build("jamba")
    paths = [path for path, _ in model.named_modules() if path.endswith("dt_proj")]
    save_adapter(model, tmp_path, target_modules=[*linear_layers(model), *paths])
    with pytest.raises(ConfigError, match="dt_proj of the model: its weights are read without running it"):
        Engine(fresh("jamba"), memory="16MiB", device="cpu", adapters={"one": tmp_path})
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    blank = {name: one * (0.0 if "dt_proj.lora_B" in name else 1.0) for name, one in tensors.items()}
    save_file(blank, tmp_path / "adapter_model.safetensors")
    Engine(fresh("jamba"), memory="16MiB", device="cpu", adapters={"one": tmp_path}).close()


# --- what is kept -----------------------------------------------------------------------------------------------------


@contextmanager
def engine_of(family: str, **options: Any) -> Iterator[Engine]:
    given = {"memory": "8MiB", "device": "cpu", "adapters": directories(family), **options}
    with Engine(fresh(family), **given) as engine:
        yield engine
        engine.check_integrity()


def cached(engine: Engine, tokens: list[int], adapter: str | None, **options: Any) -> int:
    [result] = engine.generate(tokens, GREEDY, adapter=adapter, progress=False, **options)
    return result.cached_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_store_keeps_adapters_apart_and_finds_each_again(family: str, tmp_path: Path) -> None:
    url, tokens = f"file://{tmp_path}?size=1GiB", prompt(300, 1)
    with engine_of(family, store=url) as engine:
        [said] = engine.generate(tokens, GREEDY, adapter="sql", progress=False)
        assert cached(engine, tokens, "sql") == 288
        assert cached(engine, tokens, "chat") == 0
    with engine_of(family, store=url) as engine:
        assert cached(engine, tokens, None) == 0
        [again] = engine.generate(tokens, GREEDY, adapter="sql", progress=False)
        assert (again.cached_tokens, again.token_ids) == (288, said.token_ids)
        assert again.record is not None
        assert again.record.by_source["store"] == 288
    with engine_of(family, store=url, adapters={"sql": directories(family)["chat"]}) as engine:
        assert cached(engine, tokens, "sql") == 0  # another adapter of this name
    with engine_of(family, store=url, adapters={"other": directories(family)["sql"]}) as engine:
        assert cached(engine, tokens, "other") == 0


def test_salts_and_adapters_keep_requests_apart_together() -> None:
    with engine_of("llama") as engine:
        tokens = prompt(60, 1)
        assert cached(engine, tokens, "sql") == 0
        assert cached(engine, tokens, "sql", cache_salt="tenant") == 0
        assert cached(engine, tokens, None, cache_salt="tenant") == 0
        assert cached(engine, tokens, "sql", cache_salt="tenant") == 48
        # No salt can pretend to be an adapter.
        assert cached(engine, tokens, None, cache_salt=engine._adapters["sql"].key) == 0


def test_records_tell_the_adapter() -> None:
    with engine_of("llama") as engine:
        tokens = prompt(60, 1)
        records = []
        for name in (None, "sql"):
            [result] = engine.generate(tokens, GREEDY, adapter=name, progress=False)
            assert result.record is not None
            assert result.record.to_json()["adapter"] == name
            records.append(result.record)
        assert [reason.text for reason in records[-1].why] == [
            "No cached prompt with the adapter 'sql' and the same cache_salt begins with the same token. A shared "
            "prefix has at least 16 tokens."
        ]
        [further] = engine.generate(tokens + prompt(30, 2), GREEDY, adapter="sql", progress=False)
        assert further.record is not None
        assert "no cached prompt with the adapter 'sql' goes on the same from token 60" in further.record.why[0].text


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_prompt_is_handed_over_to_the_same_adapter_alone(family: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of two engines")
    tokens, first = prompt(80, 1), LinkOptions(role="prefill", secret_file=secret)
    with engine_of(family) as alone, engine_of(family, link=first) as producer:
        assert producer.link is not None
        peers = [f"http://127.0.0.1:{producer.link.port}"]
        second = LinkOptions(role="decode", peers=peers, secret_file=secret)
        [expected] = alone.generate(tokens, GREEDY, adapter="sql", progress=False)
        swapped = {"sql": directories(family)["chat"]}
        with engine_of(family, link=second) as consumer, engine_of(family, link=second, adapters=swapped) as other:
            found = handed_over(producer, consumer, tokens, "sql", "sql")
            assert found.received is not None
            assert (found.received.num_tokens, found.token_ids) == (80, expected.token_ids)
            for one, name in ((consumer, "chat"), (consumer, None), (other, "sql")):
                assert handed_over(producer, one, tokens, "sql", name).received is None  # it has computed the prompt


def handed_over(producer: Engine, consumer: Engine, tokens: list[int], first: str, second: str | None) -> Any:
    asked = {"do_remote_decode": True}
    [offered] = producer.generate(tokens, GREEDY, adapter=first, kv_transfer_params=asked, progress=False)
    [result] = consumer.generate(
        tokens, GREEDY, adapter=second, kv_transfer_params=offered.kv_transfer_params, progress=False
    )
    return result


# --- bad input --------------------------------------------------------------------------------------------------------


def test_unknown_adapters_are_refused() -> None:
    with engine_of("llama") as engine:
        for name in ("other", "", 3):
            with pytest.raises(RequestError, match=r"no adapter .*: this engine has 'sql', 'chat'") as caught:
                engine.generate(prompt(5), GREEDY, adapter=name)  # type: ignore[arg-type]
            assert caught.value.param == "adapter"
        assert engine.model_digest("sql") != engine.model_digest("chat") != engine.model_digest()
        with pytest.raises(RequestError, match="no adapter 'other'"):
            engine.model_digest("other")
    with Engine(fresh("llama"), memory="8MiB", device="cpu") as engine:
        assert engine.adapters == {}
        with pytest.raises(RequestError, match="no adapter 'sql': this engine has none"):
            engine.generate(prompt(5), GREEDY, adapter="sql")


@pytest.mark.parametrize(
    ("adapters", "reason"),
    [
        (["/some/where"], "adapters of type list: pass a dictionary"),
        ({"": "/some/where"}, "adapter name '': choose a text"),
        ({3: "/some/where"}, "adapter name 3: choose a text"),
        ({"\ud800": "/some/where"}, "whole characters"),
        ({"sql": 3}, "adapter 'sql' of type int: pass its directory"),
        ({"sql": "/some/where"}, "no directory '/some/where': name one that a LoRA adapter was saved to"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(adapters: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Engine("/no/model/is/here", device="cpu", adapters=adapters)


def test_compiled_layers_have_no_adapters() -> None:
    with pytest.raises(InputError, match="compile=True with adapters"):
        Engine("/no/model/is/here", device="cpu", compile=True, adapters=directories("llama"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "IA3"}, "of peft_type 'IA3': only LORA is served"),
        ({"peft_type": None}, "of peft_type None"),
        ({"use_dora": True}, "has use_dora: DoRA scales the weights"),
        ({"modules_to_save": ["embed_tokens"]}, "has modules_to_save: it replaces whole modules"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "has target_parameters: .* fused experts"),
        ({"trainable_token_indices": [1, 2]}, "has trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, "has alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "has layer_replication"),
        ({"lora_bias": True}, "has lora_bias"),
        ({"bias": "lora_only"}, "has bias 'lora_only': it replaces biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights 'pissa_niter_4', which changes the weights"),
        ({"a_new_idea": {"of": "next year"}}, "has 'a_new_idea' .*, a variant of LoRA that is not known"),
        ({"r": 0}, "has r 0: a number above 0"),
        ({"r": "8"}, "has r '8'"),
        ({"r": 5}, "and its config a rank of 5; get both from one place"),
        ({"lora_alpha": None}, "has lora_alpha None"),
        ({"rank_pattern": {"q_proj": "2"}}, "has rank_pattern"),
        ({"rank_pattern": {"(": 2}}, "has rank_pattern '\\('"),
        ({"target_modules": None}, "has target_modules None"),
        ({"target_modules": ["q_proj"]}, "target_modules .* does not name"),
        ({"target_modules": "("}, "has target_modules '\\('"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_variants_are_refused_by_name(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    place = copy_of("sql", tmp_path)
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=reason):
        Engine("/no/model/is/here", device="cpu", adapters={"sql": place})


def copy_of(name: str, directory: Path) -> Path:
    for file in directories("llama")[name].iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


_MATRIX = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_model.model.lm_head.lora_A.weight": _MATRIX}, "has weights of lm_head, which target_modules"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": _MATRIX}, "which is no LoRA weight of a linear"),
        ({"base_model.model.lm_head.weight": _MATRIX}, "which is no LoRA weight of a linear"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4)}, r"float32 \[4\]: a matrix"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": _MATRIX.int()}, "int32 .*: a matrix"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": None}, "has no lora_A of model.layers.0.mlp"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_tensors_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    place = copy_of("sql", tmp_path)
    tensors = load_file(place / "adapter_model.safetensors") | change
    save_file({name: one for name, one in tensors.items() if one is not None}, place / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=reason):
        Engine("/no/model/is/here", device="cpu", adapters={"sql": place})


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    place = copy_of("sql", tmp_path)
    weights, config = place / "adapter_model.safetensors", place / "adapter_config.json"
    for name, content, reason in (
        (weights, weights.read_bytes()[:1000], "cut off or damaged"),
        (weights, None, "has no adapter_model.safetensors: save it with peft's save_pretrained"),
        (config, b"[]", "holds a JSON list, not an object"),
        (config, b"{", "cannot read"),
        (config, None, "has no adapter_config.json"),
    ):
        before = name.read_bytes() if name.exists() else b""
        name.unlink(missing_ok=True)
        if content is not None:
            name.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            Engine("/no/model/is/here", device="cpu", adapters={"sql": place})
        if name is weights:
            name.write_bytes(before)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    for family, targets, reason in (
        ("llama", ["lm_head"], "adapters of the output layer are not served"),
        ("gemma3", ["q_proj"], r"does not fit the model: .* inputs and .* outputs"),
        ("falcon_h1", ["in_proj"], "it has no such module"),
    ):
        place = tmp_path / family
        save_adapter(build(family), place, target_modules=targets)
        with pytest.raises(ConfigError, match=reason):
            Engine(fresh("llama"), memory="8MiB", device="cpu", adapters={"one": place})
