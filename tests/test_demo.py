"""The demo model: built whole or not at all, once, and served as the stock model would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridkv import Engine, SamplingParams, demo
from hybridkv.demo import build_demo_model, demo_directory
from hybridkv.errors import HybridKVError
from hybridkv.models import load_model
from hybridkv.spec import FullAttention, LinearState

GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_model(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, memory="64MiB", device="cpu") as running:
        yield running


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def never(directory: Path) -> None:
    raise AssertionError("built again")


# --- building ---------------------------------------------------------------------------------------------------------


def test_it_is_a_small_hybrid(model: Path) -> None:
    kinds = [type(spec) for spec in load_model(str(model)).layers]
    assert kinds == [LinearState, LinearState, LinearState, FullAttention] * 2
    assert 5e6 < sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(model).parameters()) < 20e6


def test_every_build_gives_the_same_bytes_and_leaves_chance_alone(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert contents(build_demo_model(tmp_path / "other")) == contents(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_that_is_there_is_used_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_write", never)
    assert build_demo_model(model) == model


def test_a_path_may_be_relative_and_the_directory_empty(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert build_demo_model(Path("here")) == tmp_path / "here"
    assert contents(tmp_path / "here") == contents(model)


def test_everyone_who_may_read_the_config_may_read_the_weights(model: Path) -> None:
    assert len({path.stat().st_mode for path in model.iterdir()}) == 1


def test_killed_half_way_it_leaves_nothing_that_is_used(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    code = (
        "import os, pathlib, shutil, signal, sys\n"
        "from hybridkv import demo\n"
        "def write(directory):\n"
        "    shutil.copytree(sys.argv[2], directory, dirs_exist_ok=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "demo._write = write\n"
        "demo.build_demo_model(pathlib.Path(sys.argv[1]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(place), str(model)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not place.exists()
    assert contents(build_demo_model(place)) == contents(model)


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(demo, "_write", write)
    with pytest.raises(HybridKVError, match="No space left"):
        build_demo_model(tmp_path / "deep" / "model")
    assert list((tmp_path / "deep").iterdir()) == []


def test_of_two_builders_at_once_the_first_to_finish_wins(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, write = tmp_path / "model", demo._write
    first: list[os.stat_result] = []

    def slow_write(directory: Path) -> None:
        monkeypatch.setattr(demo, "_write", write)
        first.append(build_demo_model(place).stat())  # the other one, from its beginning to its end
        write(directory)

    monkeypatch.setattr(demo, "_write", slow_write)
    assert build_demo_model(place) == place
    assert place.stat().st_ino == first[0].st_ino
    assert contents(place) == contents(model)
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("missing", ["README.md", "model.safetensors"])
def test_a_directory_of_other_things_is_left_alone(
    missing: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "model"
    place.mkdir()
    for name, data in contents(model).items():
        if name != missing:
            (place / name).write_bytes(data)
    before = contents(place)
    monkeypatch.setattr(demo, "_write", never)
    with pytest.raises(HybridKVError, match="not a whole demo model"):
        build_demo_model(place)
    assert contents(place) == before


def test_without_transformers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(HybridKVError, match=r"needs transformers: pip install 'hybridkv\[engine\]'"):
        build_demo_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HYBRIDKV_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/demo-v1"),
        ({"HYBRIDKV_HOME": "", "XDG_CACHE_HOME": "/x"}, "/x/hybridkv/demo-v1"),
        ({"HOME": "/me"}, "/me/.cache/hybridkv/demo-v1"),
    ],
)
def test_where_it_is_kept(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYBRIDKV_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert demo_directory() == Path(expected)


# --- running ----------------------------------------------------------------------------------------------------------


def test_the_engine_says_what_the_stock_model_says(model: Path, engine: Engine) -> None:
    stock = AutoModelForCausalLM.from_pretrained(model)
    prompts = ["hello", "The state of the world: " * 12]
    for prompt, result in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        ids = torch.tensor([result.prompt_token_ids])
        whole = stock.generate(ids, max_new_tokens=48, do_sample=False, use_cache=False)
        assert result.token_ids == whole[0, ids.shape[1] :].tolist(), prompt


def test_any_text_comes_out_as_it_went_in(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in ("hello there", "Größe: 3 °C\n\tnaïve 🙂", " the cache"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("hello the next checkpoint")) == 4


def test_the_chat_template_renders(model: Path, engine: Engine) -> None:
    prompt = engine.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}])
    assert AutoTokenizer.from_pretrained(model).decode(prompt.token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(prompt.breakpoints) == 1


def test_each_turn_of_a_chat_resumes_where_the_last_reply_ended(engine: Engine) -> None:
    messages: list[dict[str, str]] = []
    computed = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"hello there, question {turn}"})
        [result] = engine.generate(engine.render_chat(messages), GREEDY)
        assert result.cached_tokens == computed
        computed = len(result.prompt_token_ids) + len(result.token_ids) - 1  # the last token is sampled, never fed
        messages.append({"role": "assistant", "content": result.text})


def test_replies_are_words_and_end_by_themselves(engine: Engine) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=400, seed=1)
    results = engine.generate([str(number) for number in range(8)], params)
    assert {result.finish_reason for result in results} == {"stop"}
    assert all(word.isalpha() for result in results for word in result.text.split())
