"""Adapters of a server: the field `model` names one, and what a request says with it is said of the adapter."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from hybridkv import Engine
from hybridkv.errors import InputError
from hybridkv.serve import ServeOptions, make_app
from tests.engine.drive import GREEDY
from tests.engine.lora import directories
from tests.engine.zoo import fresh, prompt
from tests.serve.serving import MODEL, Served, check_idle, error_of, record, serving


@pytest.fixture(scope="module")
def adapted() -> Iterator[Served]:
    with (
        Engine(fresh("qwen3_next"), memory="16MiB", device="cpu", adapters=directories("qwen3_next")) as engine,
        serving(engine, root="/where/the/model/is") as served,
    ):
        yield served
        check_idle(served)


def ask(served: Served, model: str, tokens: list[int]) -> openai.types.Completion:
    return served.client.completions.create(
        model=model,
        prompt=tokens,
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


def test_models_are_listed_with_their_parents(adapted: Served) -> None:
    listed = {one.id: one.model_dump() for one in adapted.client.models.list()}
    assert list(listed) == [MODEL, "sql", "chat"]
    assert [one["parent"] for one in listed.values()] == [None, MODEL, MODEL]
    assert listed["sql"]["root"] == str(directories("qwen3_next")["sql"])
    assert adapted.client.models.retrieve("chat").model_dump() == listed["chat"]


def test_the_model_of_a_request_names_its_adapter(adapted: Served) -> None:
    tokens = prompt(60, 1)
    said = {}
    for name in (MODEL, "sql", "chat"):
        adapter = None if name == MODEL else name
        reply = ask(adapted, name, tokens)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == 0
        assert reply.model == name
        again = ask(adapted, name, tokens)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == 48
        [result] = adapted.engine.generate(tokens, GREEDY, adapter=adapter, progress=False)
        said[name] = reply.choices[0].model_dump()["token_ids"]
        assert said[name] == again.choices[0].model_dump()["token_ids"] == result.token_ids
        check_record(adapted, reply.id, name, adapter)
    assert len({tuple(ids) for ids in said.values()}) == 3


def check_record(served: Served, reply_id: str, model: str, adapter: str | None) -> None:
    found = record(served, reply_id)
    assert (found["model"], found["prompts"][0]["adapter"]) == (model, adapter)


def test_pieces_of_a_stream_have_the_name_of_the_adapter(adapted: Served) -> None:
    pieces = list(
        adapted.client.completions.create(model="sql", prompt=prompt(20, 2), max_tokens=3, temperature=0, stream=True)
    )
    assert {piece.model for piece in pieces} == {"sql"}


def test_unknown_names_are_a_404(adapted: Served) -> None:
    for path, body in (("/v1/completions", {"prompt": [5, 6]}), ("/detokenize", {"tokens": [5, 6]})):
        error = error_of(adapted.post(path, model="other", **body), 404)
        assert error["message"] == "no model 'other' here: this server has 'tiny', 'sql', 'chat'"
        assert error["param"] == "model"
    error_of(adapted.http.get("/v1/models/other"), 404)


def test_an_adapter_may_not_have_the_name_of_the_model(adapted: Served) -> None:
    for options in (ServeOptions("sql"), ServeOptions("tiny", root="chat")):
        with pytest.raises(InputError, match="has the name of the model: give one of them another name"):
            make_app(adapted.engine, options)
