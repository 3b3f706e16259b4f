"""A trained model on every path of the cache: a wrong page means a wrong answer, and there is none.

Each prompt hides a key, a fact or a list far back in its context. In float32 all paths write the same replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hybridkv import Engine, SamplingParams
from hybridkv.demo import demo_document, demo_model, demo_questions

GREEDY = SamplingParams(temperature=0, max_tokens=40)
TEXT = demo_document()[:1800]
DOCUMENT = demo_document()[:1600]
"""As much of it as the first three questions are about."""


class Task(NamedTuple):
    messages: list[dict[str, str]]
    expected: str


def keep(label: str, value: str, question: str) -> Task:
    """The value comes first, and some 500 tokens later the question."""
    content = f"The {label} is {value}.\n\n{TEXT}\n\n{question}"
    return Task([{"role": "user", "content": content}], f"The {label} is {value}.")


def about_document(question: str, expected: str) -> Task:
    system = {"role": "system", "content": DOCUMENT}
    return Task([system, {"role": "user", "content": question}], expected)


KEYS = [
    keep("secret word", "walnut", "What is the secret word?"),
    keep("secret word", "marble", "What was the secret word?"),
    keep("access code", "K7QX2", "Tell me the access code."),
    keep("lucky number", "48213", "Do you remember the lucky number?"),
]
COUNT = Task([{"role": "user", "content": f"{TEXT}\n\nCount from 3 to 12."}], "3, 4, 5, 6, 7, 8, 9, 10, 11, 12.")
TASKS = [*KEYS, COUNT, *(about_document(*question) for question in demo_questions()[:3])]


def make_engine(**options: Any) -> Engine:
    return Engine(demo_model(), device="cpu", dtype="float32", **{"memory": "256MiB", **options})


def answers(engine: Engine, tasks: Sequence[Task], params: SamplingParams = GREEDY) -> list[Any]:
    """Ask all at once; every reply is right."""
    results = engine.generate([engine.render_chat(task.messages) for task in tasks], params, progress=False)
    for task, result in zip(tasks, results, strict=True):
        for completion in result.completions:
            assert task.expected in completion.text
    engine.check_integrity()
    return results


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """What each request gets that has an engine for itself."""
    with make_engine(max_num_seqs=1) as engine:
        texts = []
        for task in TASKS:
            engine.reset_cache()
            texts += [result.text for result in answers(engine, [task])]
        return texts


def texts_of(results: Sequence[Any]) -> list[str]:
    return [result.text for result in results]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 48, "max_num_seqs": 16},
        {"block_size": 32},
        {"attn_pack_size": 1},
        {"row_layers": 1},
    ],
    ids=["whole", "chunks", "larger_blocks", "packs", "rows"],
)
def test_all_at_once_and_again_from_the_cache(alone: list[str], options: dict[str, Any]) -> None:
    with make_engine(**options) as engine:
        first, again = answers(engine, TASKS), answers(engine, TASKS)
        assert texts_of(first) == texts_of(again) == alone
        assert all(result.cached_tokens > len(result.prompt_token_ids) - 100 for result in again)


def test_requests_that_are_preempted_and_evicted(alone: list[str]) -> None:
    with make_engine(memory="16MiB", max_num_batched_tokens=256) as engine:
        assert texts_of(answers(engine, TASKS)) == alone
        assert texts_of(answers(engine, TASKS)) == alone
        assert engine.stats().preemptions
        assert engine.stats().cache.blocks_evicted


def test_forks_of_one_prompt(alone: list[str]) -> None:
    with make_engine() as engine:
        params = SamplingParams(temperature=0, max_tokens=40, n=3)
        for result, text in zip(answers(engine, TASKS, params), alone, strict=True):
            assert [completion.text for completion in result.completions] == [text] * 3


def fill_store(directory: Path, stream: str) -> str:
    """The URL of a store with everything that the tasks computed."""
    store = f"file://{directory}?size=1GiB"
    with make_engine(store=store, stream=stream) as engine:
        answers(engine, TASKS)
        engine.flush_store()
    return store


@pytest.mark.parametrize("stream", ["async", "layerwise"])
def test_a_restart_loads_from_the_store(alone: list[str], stream: str, tmp_path: Path) -> None:
    store = fill_store(tmp_path, stream)
    with make_engine(store=store, stream=stream) as engine:
        results = answers(engine, TASKS)
        counted = engine.stats().stream
        assert texts_of(results) == alone
        assert counted is not None
        assert counted.loaded_tokens > 0.5 * sum(len(result.prompt_token_ids) for result in results)


@pytest.mark.parametrize("stream", ["async", "layerwise"])
def test_damaged_objects_are_computed_again(alone: list[str], stream: str, tmp_path: Path) -> None:
    store = fill_store(tmp_path, stream)
    objects = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 50_000]
    for path in objects[::2]:
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"damaged!")
    with make_engine(store=store, stream=stream) as engine:
        assert texts_of(answers(engine, TASKS)) == alone
        counted = engine.stats().store
        assert counted is not None
        assert counted.corrupt


def test_the_next_turn_remembers_the_last_one() -> None:
    with make_engine() as engine:
        messages = list(KEYS[0].messages)
        for question in ("What is the secret word?", "Say the secret word again."):
            [result] = answers(engine, [Task(messages, KEYS[0].expected)])
            messages += [{"role": "assistant", "content": result.text}, {"role": "user", "content": question}]
        [result] = answers(engine, [Task(messages, KEYS[0].expected)])
        assert result.cached_tokens > len(result.prompt_token_ids) - 60


# --- the skills would notice ------------------------------------------------------------------------------------------


def spoil_attention(engine: Engine) -> None:
    """Full attention finds the pages of other tokens."""
    for layer in engine._core.runner.memory.tokens.values():
        for part in layer.parts.values():
            part.copy_(part.flip(0))


def spoil_states(engine: Engine) -> None:
    """All recurrent states are empty."""
    for layer in engine._core.runner.memory.states.values():
        for part in layer.parts.values():
            part.zero_()


@pytest.mark.parametrize("spoiler", [spoil_attention, spoil_states])
def test_a_wrong_page_means_a_wrong_answer(spoiler: Callable[[Engine], None]) -> None:
    with make_engine() as engine:
        answers(engine, KEYS)
        spoiler(engine)
        with torch.no_grad(), pytest.raises(AssertionError):
            answers(engine, KEYS)
