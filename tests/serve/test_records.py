"""Records of requests over HTTP: of every kind of request, however it ended."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from hybridkv import Engine
from hybridkv.serve.history import History
from hybridkv.serve.inspection_replies import PrefixList, RecordList
from tests.engine.zoo import prompt
from tests.serve.serving import Client, Pace, Served, error_of, eventually, record, serving

ROOT = "/v1/hybridkv"
BLOCK = 16


@pytest.fixture
def served(recorded: Served) -> Served:
    return recorded


def test_a_whole_reply(served: Served) -> None:
    ids = prompt(40)
    first = served.post("/v1/completions", prompt=ids, max_tokens=3, ignore_eos=True).json()
    second = served.post("/v1/completions", prompt=ids, max_tokens=3, ignore_eos=True).json()
    cold, warm = (record(served, one["id"])["prompts"][0] for one in (first, second))
    assert cold["spans"] == [{"start": 0, "end": 40, "source": "computed"}]
    assert cold["why"][0]["code"] == "never_seen"
    assert warm["request_id"] == f"{second['id']}-0"
    assert warm["cached_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK
    assert warm["spans"][0] == {"start": 0, "end": 2 * BLOCK, "source": "memory"}
    assert (warm["reply_tokens"], warm["finish_reason"]) == (3, "length")


def test_a_stream_is_known_by_the_id_of_its_pieces(served: Served) -> None:
    body = {"prompt": prompt(20), "max_tokens": 3, "stream": True, "ignore_eos": True}
    lines = served.post("/v1/completions", **body).text.split("\n\n")
    [name] = {json.loads(line.removeprefix("data: "))["id"] for line in lines if line.startswith("data: {")}
    found = record(served, name)
    assert (found["outcome"], found["path"], found["model"]) == ("completed", "/v1/completions", "tiny")
    assert found["prompts"][0]["reply_tokens"] == 3


def test_a_chat(served: Served) -> None:
    messages = [{"role": "user", "content": "Hello there, who are you?"}]
    reply = served.post("/v1/chat/completions", messages=messages, max_tokens=2).json()
    found = record(served, reply["id"])
    assert found["path"] == "/v1/chat/completions"
    assert found["prompts"][0]["prompt_tokens"] == reply["usage"]["prompt_tokens"]


def test_several_prompts_and_replies(served: Served) -> None:
    body = {"prompt": [prompt(20, 1), prompt(30, 2)], "n": 2, "max_tokens": 3, "ignore_eos": True}
    reply = served.post("/v1/completions", **body).json()
    found = record(served, reply["id"], prompts=2)
    assert [one["prompt_tokens"] for one in found["prompts"]] == [20, 30]
    assert [one["reply_tokens"] for one in found["prompts"]] == [6, 6]
    [line] = [one for one in served.http.get(f"{ROOT}/requests").json()["data"] if one["id"] == reply["id"]]
    assert (line["prompt_tokens"], line["reply_tokens"]) == (50, 12)
    assert sum(line["by_source"].values()) == 50


def test_a_request_is_also_known_by_its_request_id(served: Served) -> None:
    headers = {"X-Request-Id": "a/b c?%2F tokens"}
    reply = served.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}, headers=headers).json()
    found = served.http.get(f"{ROOT}/requests/a%2Fb%20c%3F%252F%20tokens")
    assert found.json()["id"] == reply["id"]
    assert found.headers["cache-control"] == "no-store"


def test_a_client_that_goes_away(served: Served, pace: Pace) -> None:
    client = Client(served, prompt=prompt(20), stream=True)
    pace.advance(2)
    [running] = [one for one in served.http.get(f"{ROOT}/requests").json()["data"] if one["outcome"] == "running"]
    assert served.http.get(f"{ROOT}/requests/{running['id']}").json()["prompts"] == [None]
    error_of(served.http.get(f"{ROOT}/requests/{running['id']}/tokens"), 404)
    client.vanish()
    pace.run()
    found = record(served, running["id"])
    assert found["outcome"] == "disconnected"
    assert found["prompts"][0]["finish_reason"] == "abort"


def test_a_reply_that_fails(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(served.engine._core.runner, "run", fails)
    response = served.http.post(
        "/v1/completions", json={"prompt": prompt(20), "max_tokens": 3}, headers={"X-Request-Id": "broken"}
    )
    assert response.status_code == 500
    found = record(served, "broken")
    assert found["outcome"] == "failed"
    assert found["prompts"][0]["finish_reason"] == "error"


def test_what_is_refused_has_no_record(served: Served) -> None:
    before = served.http.get(f"{ROOT}/requests").json()
    error_of(served.post("/v1/completions", prompt=[10**6]), 400)
    assert served.http.get(f"{ROOT}/requests").json() == before


def test_the_list_is_cut_and_newest_first(served: Served) -> None:
    for seed in range(3):
        served.post("/v1/completions", prompt=prompt(5, seed), max_tokens=1)
    response = served.http.get(f"{ROOT}/requests?limit=2")
    RecordList.model_validate_json(response.content, strict=True)
    found = response.json()
    assert [one["created"] for one in found["data"]] == sorted((one["created"] for one in found["data"]), reverse=True)
    assert len(found["data"]) == 2


def test_texts_of_tokens(served: Served) -> None:
    ids = prompt(30)
    reply = served.post("/v1/completions", prompt=ids, max_tokens=1).json()
    record(served, reply["id"])
    path = f"{ROOT}/requests/{reply['id']}/tokens"
    tokenizer: Any = served.engine.tokenizer
    texts = [tokenizer.decode([token]) for token in ids]
    assert served.http.get(path).json() == {"start": 0, "end": 30, "total": 30, "texts": texts}
    assert served.http.get(f"{path}?start=10&end=12").json()["texts"] == texts[10:12]
    assert served.http.get(f"{path}?start=30&end=99999").json() == {"start": 30, "end": 30, "total": 30, "texts": []}
    wrong = {"start=31": "start", "start=5&end=4": "start", "prompt=1": "prompt", "end=x": "end", "prompt=-1": "prompt"}
    for query, param in wrong.items():
        error = error_of(served.http.get(f"{path}?{query}"), 400)
        assert error["param"] == param
        assert "\n" not in error["message"]


def test_token_ids_that_are_no_longer_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.serve.app.History", partial(History, max_tokens=30))
    with serving(engine) as served:
        names = [served.post("/v1/completions", prompt=prompt(20, seed), max_tokens=1).json()["id"] for seed in (1, 2)]
        for name in names:
            record(served, name)
        assert "no longer kept" in error_of(served.http.get(f"{ROOT}/requests/{names[0]}/tokens"), 404)["message"]
        assert served.http.get(f"{ROOT}/requests/{names[1]}/tokens").json()["total"] == 20
        assert record(served, names[0])["prompts"][0]["prompt_tokens"] == 20


def test_a_bounded_history(engine: Engine) -> None:
    with serving(engine, history=2) as served:
        names = [served.post("/v1/completions", prompt=[5, seed + 5], max_tokens=1).json()["id"] for seed in range(4)]
        assert [one["id"] for one in served.http.get(f"{ROOT}/requests").json()["data"]] == names[:1:-1]
        error_of(served.http.get(f"{ROOT}/requests/{names[0]}"), 404)
        assert served.metrics()["hybridkv_history_requests"] == 2
    with serving(engine, history=0) as served:
        name = served.post("/v1/completions", prompt=[5], max_tokens=1).json()["id"]
        error_of(served.http.get(f"{ROOT}/requests/{name}"), 404)
        assert served.http.get(f"{ROOT}/requests").json() == {"object": "list", "data": []}


def listed(served: Served) -> list[dict[str, Any]]:
    """Prefixes of the last snapshot, which may be some seconds old."""
    response = served.http.get(f"{ROOT}/prefixes")
    PrefixList.model_validate_json(response.content, strict=True)
    nodes: list[dict[str, Any]] = response.json()["nodes"]
    return nodes


def test_prefixes_are_listed_pinned_and_dropped(served: Served) -> None:
    served.engine.reset_cache()
    served.post("/v1/completions", prompt=prompt(70), max_tokens=1)
    assert eventually(lambda: [node["end"] for node in listed(served)] == [64])
    [node] = listed(served)
    tokenizer: Any = served.engine.tokenizer
    text = tokenizer.decode(prompt(70))
    assert text.startswith(node["head"])
    path = f"{ROOT}/prefixes/{node['key']}"
    shown = served.http.get(path).json()
    assert (shown["start"], shown["is_cut"], shown["before"]) == (0, False, "")
    assert shown["text"][:40] == text[:40]
    pinned = served.http.post(f"{path}/pin", json={"seconds": 60}).json()
    assert pinned == {"key": node["key"], "tokens": pinned["tokens"], "expires_in_s": 60.0}
    assert pinned["tokens"] >= 64
    assert eventually(lambda: bool(listed(served)[0]["pinned"]))
    assert served.http.delete(f"{path}/pin").json() == {"key": node["key"], "pinned": False}
    error_of(served.http.delete(f"{path}/pin"), 404)
    assert served.http.delete(path).json()["dropped_tokens"] >= 64
    for method, tail in (("GET", ""), ("DELETE", ""), ("DELETE", "/pin")):
        assert error_of(served.http.request(method, path + tail), 404)["param"] == "key"
    error_of(served.http.post(f"{path}/pin", json={"seconds": 60}), 404)


@pytest.mark.parametrize("key", ["zz", "abc", "AB", "ab" * 65, "%20", "ab%0A"])
def test_keys_that_are_none(served: Served, key: str) -> None:
    for method, tail in (("GET", ""), ("DELETE", ""), ("DELETE", "/pin")):
        assert error_of(served.http.request(method, f"{ROOT}/prefixes/{key}{tail}"), 400)["param"] == "key"


@pytest.mark.parametrize("body", [{}, {"seconds": 0}, {"seconds": 604801}, {"seconds": "60"}, {"seconds": None}, []])
def test_pins_that_are_none(served: Served, body: Any) -> None:
    error = error_of(served.http.post(f"{ROOT}/prefixes/ab/pin", json=body), 400)
    assert "\n" not in error["message"]
