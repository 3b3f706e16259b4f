"""The demo model: its files come with the package, and the engine runs it as transformers does."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybridkv
from hybridkv import Engine, SamplingParams
from hybridkv.demo import demo_document, demo_model, demo_questions, files
from hybridkv.errors import InputError
from hybridkv.models import load_model
from hybridkv.spec import FullAttention, LinearState
from tests.engine.reference import by_torch

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(demo_model(), memory="64MiB", device="cpu") as running:
        yield running


# --- files ------------------------------------------------------------------------------------------------------------


def test_it_lies_inside_the_package_under_the_name_it_is_served_as() -> None:
    assert demo_model() == Path(hybridkv.__file__).resolve().parent / "demo/hybridkv-demo"


def test_finding_it_takes_no_torch() -> None:
    code = "import sys; from hybridkv.demo import demo_model; demo_model(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named_with_its_place(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "hybridkv-demo"
    place.mkdir()
    for path in demo_model().iterdir():
        if path.name != missing:
            (place / path.name).touch()
    monkeypatch.setattr(files, "_HERE", tmp_path)
    with pytest.raises(InputError, match=f"the demo model in {place} lacks {missing}: install hybridkv again"):
        demo_model()


def test_a_wheel_and_a_commit_bring_all_its_files() -> None:
    """Hatch packs everything below the package that no rule of its own and no .gitignore leaves out."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert wheel["wheel"].keys() == {"packages", "hooks"}
    assert wheel["wheel"]["packages"] == ["src/hybridkv"]
    shipped = [path for path in files._HERE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {"document.txt", "questions.json", "model.safetensors"} <= {path.name for path in shipped}
    if (ROOT / ".git").exists():
        ignored = subprocess.run(["git", "check-ignore", "--no-index", *shipped], cwd=ROOT, capture_output=True)
        assert ignored.stdout == b""


def test_it_is_a_small_trained_hybrid_in_bfloat16() -> None:
    kinds = {type(spec) for spec in load_model(str(demo_model())).layers}
    assert kinds == {LinearState, FullAttention}
    weights = AutoModelForCausalLM.from_pretrained(demo_model()).state_dict().values()
    assert 5e6 < sum(weight.numel() for weight in weights) < 20e6
    assert json.loads((demo_model() / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    assert (demo_model() / "README.md").is_file()


def test_the_questions_can_be_answered_from_the_document(engine: Engine) -> None:
    document, questions = demo_document(), demo_questions()
    assert 1000 < engine.prepare(document).num_tokens < 4000
    assert 5 <= len(questions) <= 7
    assert len({one.question for one in questions}) == len(questions)
    for question, expected in questions:
        assert expected in document
        assert expected not in question


# --- running ----------------------------------------------------------------------------------------------------------


def test_the_engine_says_what_the_stock_model_says() -> None:
    """In float32, where two ways to compute the same do not differ enough to choose another token."""
    stock = by_torch(AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32))
    chat = [{"role": "system", "content": demo_document()[:800]}, {"role": "user", "content": "Who are you?"}]
    with Engine(demo_model(), memory="64MiB", device="cpu", dtype="float32") as engine:
        for prompt in (engine.prepare("hello"), engine.render_chat(chat)):
            [result] = engine.generate(prompt, GREEDY)
            ids = torch.tensor([result.prompt_token_ids])
            whole = stock.generate(ids, max_new_tokens=64, do_sample=False, use_cache=False)
            assert result.token_ids == whole[0, ids.shape[1] :].tolist()


def test_any_text_comes_out_as_it_went_in() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    for text in ("hello there", "Größe: 3 °C\n\tnaïve 🙂", " the cache", demo_document()):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_ends_each_message_at_a_breakpoint(engine: Engine) -> None:
    prompt = engine.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}])
    text = engine.detokenize(prompt)
    assert text.index("Be brief.") < text.index("hello")
    [end] = prompt.breakpoints
    assert "Be brief." in engine.detokenize(prompt.token_ids[:end])
    assert "hello" not in engine.detokenize(prompt.token_ids[:end])


def test_each_turn_of_a_chat_resumes_where_the_last_reply_ended(engine: Engine) -> None:
    messages: list[dict[str, str]] = []
    computed = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"hello there, question {turn}"})
        [result] = engine.generate(engine.render_chat(messages), GREEDY)
        assert result.cached_tokens == computed
        computed = len(result.prompt_token_ids) + len(result.token_ids) - 1  # the last token is sampled, never fed
        messages.append({"role": "assistant", "content": result.text})


def test_it_is_trained(engine: Engine) -> None:
    """It knows its name, and ends its reply by itself."""
    [result] = engine.generate(engine.render_chat([{"role": "user", "content": "Who are you?"}]), GREEDY)
    assert "hybridkv" in result.text.lower()
    assert result.finish_reason == "stop"
