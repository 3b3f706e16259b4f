"""The acts of the demo on a tiny model: what they measure, and that nothing is left behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridkv import Engine
from hybridkv.demo import Question, acts
from hybridkv.demo.acts import Demo
from hybridkv.demo.records import Answer, Comparison, Corruption, Figures, Restart
from hybridkv.errors import DiskError, InputError
from tests.engine.checkpoints import save_checkpoint

DOCUMENT = "The system keeps the pages that the next request will read. A state remembers what the window forgets. " * 9
QUESTIONS = [Question("Who keeps the pages?", ""), Question("What remembers?", ""), Question("What forgets?", "never")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint("qwen3_next", directory)
    return directory


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def demo(checkpoint: Path, place: Path) -> Iterator[Demo]:
    def start(store: str) -> Engine:
        return Engine(checkpoint, memory="16MiB", device="cpu", store=store, stream="layerwise")

    with Demo(start, DOCUMENT, QUESTIONS) as demo:
        demo.start()
        yield demo


def test_one_act_after_another(demo: Demo, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = demo.read()
    assert (read.question, read.cached_tokens, read.is_right) == ("Who keeps the pages?", 0, True)
    assert read.ttft_s > 0

    comparisons = list(demo.ask())
    assert [one.cached.question for one in comparisons] == ["What remembers?", "What forgets?"]
    assert [one.cached.is_right for one in comparisons] == [True, False]
    for one in comparisons:
        assert one.cached.prompt_tokens - 48 < one.cached.cached_tokens < one.cached.prompt_tokens
        assert one.cold == replace(one.cached, cached_tokens=0, ttft_s=one.cold.ttft_s)

    restart = demo.restart()
    assert restart.answer.text == comparisons[0].cached.text
    assert restart.answer.cached_tokens == restart.loaded_tokens > 0
    assert restart.loaded_bytes > 0
    assert restart.layerwise_loads == 1

    corruption = demo.corrupt()
    assert corruption.answer.text == comparisons[0].cached.text
    assert (corruption.answer.cached_tokens, corruption.corrupt_objects) == (0, 1)
    assert corruption.computed_tokens == corruption.answer.prompt_tokens
    assert "bytes of a row are not those that were written" in " ".join(corruption.log)
    assert corruption.object_name.startswith("full/")
    assert caplog.messages == []  # what is drawn is not logged as well

    assert len(list(place.iterdir())) == 1
    demo.__exit__(None, None, None)
    assert list(place.iterdir()) == []


def test_an_interrupt_leaves_no_files(demo: Demo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(acts, "_flip_bytes", interrupted)
    assert list(place.iterdir())
    demo.read()
    with pytest.raises(KeyboardInterrupt), demo:
        demo.corrupt()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(("number", "kind"), [(28, DiskError), (13, InputError)])
def test_without_a_temporary_directory_it_says_what_to_do(
    number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> None:
        raise OSError(number, "no way")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", fails)
    with pytest.raises(kind, match=r"no temporary directory for the demo's store: no way; .* \$TMPDIR"):
        Demo(lambda url: pytest.fail("started"), DOCUMENT, QUESTIONS)


# --- records ----------------------------------------------------------------------------------------------------------


def figures() -> Figures:
    cold = Answer("Who?", "Mira", "Mira Holt.", prompt_tokens=100, cached_tokens=0, ttft_s=1.0, is_right=True)
    cached = replace(cold, cached_tokens=96, ttft_s=0.1)
    return Figures(
        "model",
        "cpu",
        cold,
        [Comparison(cached, cold), Comparison(replace(cached, ttft_s=0.3), replace(cold, ttft_s=3.0))],
        Restart(replace(cached, ttft_s=0.2), loaded_tokens=96, loaded_bytes=4096, layerwise_loads=1),
        Corruption(cold, "full/0", flipped_bytes=8, corrupt_objects=1, log=()),
    )


def test_figures_are_right_as_a_whole() -> None:
    whole = figures()
    assert whole.problems() == []
    assert len(list(whole.answers())) == 7
    assert whole.first_tokens() == {
        "computed": 2.0,
        "from memory": pytest.approx(0.2),
        "from disk": 0.2,
        "corrupt on disk": 1.0,
    }
    record = json.loads(json.dumps(whole.as_json()))
    assert record["read"]["is_right"] is True
    assert [one["ratio"] for one in record["comparisons"]] == [pytest.approx(10), pytest.approx(10)]
    assert record["problems"] == []


def test_every_problem_is_told() -> None:
    whole = figures()
    assert whole.restart is not None
    assert whole.corruption is not None
    whole.read = replace(whole.read, is_right=False, cached_tokens=16)
    whole.comparisons[0] = replace(whole.comparisons[0], cached=whole.comparisons[0].cold)
    whole.restart = replace(whole.restart, loaded_tokens=0)
    whole.corruption = replace(whole.corruption, corrupt_objects=0)
    assert whole.problems() == [
        "1 of 7 answers are wrong.",
        "A question that should have been computed found cached tokens.",
        "A question about the document found nothing in the cache.",
        "The new engine loaded nothing from its store.",
        "The damaged object was not noticed.",
    ]
