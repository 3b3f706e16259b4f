"""Hidden states over HTTP: files below the operator's directory, their locks, their space and their end."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from hybridkv import Engine, SamplingParams
from hybridkv.errors import InputError, RequestError
from hybridkv.serve import HiddenFolder, ServeOptions, make_app
from hybridkv.serve.hidden_folder import new_name
from hybridkv.taps.files import read_sample, write_sample
from hybridkv.taps.tensors import encode
from tests.engine.zoo import prompt
from tests.serve.serving import Client, Pace, Served, check_idle, error_of, eventually, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Who keeps the pages?"}, {"role": "assistant", "content": "The system."}]
LAYERS = [0, 2, -1]
PROMPT = prompt(40, 1)
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1, "hidden_states": {"layers": LAYERS}}
BY_DEFAULT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}


@pytest.fixture
def folder(tmp_path: Path) -> HiddenFolder:
    return HiddenFolder(tmp_path / "states")


@pytest.fixture
def served(engine: Engine, folder: HiddenFolder) -> Iterator[Served]:
    with serving(engine, hidden_folder=folder, hidden_layers=(1, -1)) as served:
        yield served
        check_idle(served)


def path_of(response: httpx.Response) -> Path:
    assert response.status_code == 200, response.text
    return Path(response.json()["kv_transfer_params"]["hidden_states_path"])


def lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def names(folder: HiddenFolder) -> set[str]:
    return set(os.listdir(folder.directory))


def expected(engine: Engine, layers: list[int], ids: list[int] = PROMPT) -> torch.Tensor:
    params = SamplingParams(max_tokens=1, temperature=0, hidden_layers=layers)
    states = engine.generate([ids], params)[0].hidden_states
    assert states is not None
    return states


def assert_refused(served: Served, folder: HiddenFolder, body: dict[str, Any], said: str, *, status: int = 400) -> None:
    """Before anything of it runs, and without a trace."""
    before, steps = names(folder), served.engine.stats().steps
    error = error_of(served.post(COMPLETIONS, **body), status)
    assert said in error["message"]
    assert str(error["param"]).startswith("hidden_states") or status != 400
    assert (names(folder), served.engine.stats().steps) == (before, steps)


def test_a_file_with_what_the_engine_computes(served: Served, folder: HiddenFolder) -> None:
    response = served.post(COMPLETIONS, **ASKED)
    path = path_of(response)
    assert path.is_absolute()
    assert path.parent == folder.directory
    data = load_file(path)
    assert data["token_ids"].tolist() == PROMPT
    assert data["hidden_states"].shape == (40, 3, served.engine.plan.model.hidden_size)
    assert torch.equal(data["hidden_states"], expected(served.engine, LAYERS).to(torch.bfloat16))
    read_sample(path, 0, is_shard=False)  # its checksum is right
    assert response.json()["choices"][0]["prompt_token_ids"] is None


def test_only_the_server_s_user_may_read(served: Served, folder: HiddenFolder) -> None:
    before = os.umask(0)
    try:
        path = path_of(served.post(COMPLETIONS, **ASKED))
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.directory.stat().st_mode) == 0o700
    assert names(folder) == {path.name, lock_of(path).name}
    for one in (path, lock_of(path)):
        assert stat.S_IMODE(one.stat().st_mode) == 0o600


def test_names_have_nothing_of_requests(served: Served, folder: HiddenFolder) -> None:
    """Whatever a client sends is no part of a path; and no two names are alike."""
    salted = {**ASKED, "cache_salt": "../../x", "user": "../y", "request_id": "../z", "model": None}
    transfer = {"kv_transfer_params": {"hidden_states_path": "/tmp/taken", "handle": "../taken"}}
    headers = {"X-Request-Id": "../../taken"}
    paths = [path_of(served.http.post(COMPLETIONS, json={**salted, **transfer}, headers=headers)) for _ in range(3)]
    assert len(set(paths)) == 3
    for path in paths:
        assert path.parent == folder.directory
        assert re.fullmatch(r"hidden_[0-9a-f]{32}\.safetensors", path.name)
    assert len(names(folder)) == 6
    assert os.listdir(folder.directory.parent) == ["states"]


def test_fields_have_no_paths(served: Served, folder: HiddenFolder) -> None:
    for name in ("path", "directory", "name", "hidden_states_path"):
        assert_refused(served, folder, {**ASKED, "hidden_states": {"layers": [1], name: "/tmp"}}, "pass true, false")


def test_the_lock_protocol(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is held while the file is written, and free when the answer is there. Its reader removes both."""
    is_held: list[bool] = []

    def watched(path: Path, *args: Any, **named: Any) -> int:
        with lock_of(path).open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_held.append(True)
        return write_sample(path, *args, **named)

    monkeypatch.setattr("hybridkv.serve.hidden_folder.write_sample", watched)
    path = path_of(served.post(COMPLETIONS, **ASKED))
    assert is_held == [True]
    with lock_of(path).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert path.exists()
    lock_of(path).unlink()
    path.unlink()
    assert path_of(served.post(COMPLETIONS, **ASKED)) != path


def test_the_reply_too(served: Served) -> None:
    body = {**ASKED, "max_tokens": 4, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    response = served.post(COMPLETIONS, **{**body, "hidden_states": {"layers": LAYERS, "tokens": "all"}})
    data = load_file(path_of(response))
    [choice] = response.json()["choices"]
    ids = PROMPT + choice["token_ids"][:-1]
    assert data["token_ids"].tolist() == ids
    assert len(data["hidden_states"]) == len(ids) == 43
    wrong = (data["hidden_states"].float() - expected(served.engine, LAYERS, ids).float()).abs().max()
    assert wrong < 0.05


def test_a_client_that_sends_no_field(served: Served) -> None:
    """The operator's default: what speculators' client sends."""
    response = served.post(COMPLETIONS, **BY_DEFAULT)
    assert response.json()["choices"][0]["prompt_token_ids"] == PROMPT
    data = load_file(path_of(response))
    assert torch.equal(data["hidden_states"], expected(served.engine, [1, -1]).to(torch.bfloat16))


def test_chats(served: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "add_generation_prompt": False, "continue_final_message": False}
    ids = served.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"]
    response = served.post(CHAT, **body, return_token_ids=True)
    assert response.json()["prompt_token_ids"] == ids
    assert load_file(path_of(response))["token_ids"].tolist() == ids
    path_of(served.post(CHAT, **body, hidden_states=True))


@pytest.mark.parametrize(
    "body", [{"return_token_ids": False}, {"hidden_states": False}, {"n": 2}, {"prompt": [PROMPT, PROMPT]}], ids=str
)
def test_what_the_default_is_not_for(served: Served, folder: HiddenFolder, body: dict[str, Any]) -> None:
    response = served.post(COMPLETIONS, **{**BY_DEFAULT, **body})
    assert response.json()["kv_transfer_params"] is None
    assert names(folder) == set()


def test_streams_have_none_by_default(served: Served, folder: HiddenFolder) -> None:
    response = served.post(COMPLETIONS, **BY_DEFAULT, stream=True)
    assert "[DONE]" in response.text
    assert names(folder) == set()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_token_ids_of_every_choice(served: Served, path: str, stream: bool) -> None:
    """Also without hidden states; in streams with the first piece of a choice, and no other."""
    asked = {"prompt": [PROMPT, PROMPT[:9]]} if path == COMPLETIONS else {"messages": MESSAGES}
    body = {**asked, "max_tokens": 3, "n": 2, "hidden_states": False, "return_token_ids": True}
    chat = served.post("/tokenize", messages=MESSAGES).json()["tokens"]
    want = [PROMPT, PROMPT, PROMPT[:9], PROMPT[:9]] if path == COMPLETIONS else [chat, chat]
    if not stream:
        reply = served.post(path, **body).json()
        ids = [one["prompt_token_ids"] for one in reply["choices"]] if path == COMPLETIONS else None
        assert (ids or [reply["prompt_token_ids"]] * 2) == want
        return
    found: dict[int, list[list[int]]] = {}
    pieces = served.post(path, **body, stream=True).text.split("\n\n")
    for chunk in [json.loads(piece.removeprefix("data: ")) for piece in pieces if piece.startswith("data: {")]:
        [choice] = chunk["choices"]
        ids = (choice if path == COMPLETIONS else chunk)["prompt_token_ids"]
        if ids is not None:
            found.setdefault(choice["index"], []).append(ids)
    assert found == {index: [ids] for index, ids in enumerate(want)}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"hidden_states": {"layers": [99]}}, "hidden_states.layers has 99: this model's are 0 to"),
        ({"hidden_states": {"layers": [1, 1]}}, "hidden_states.layers has layer 1 twice"),
        ({"hidden_states": {"layers": []}}, "{'layers': []}: pass true, false, or an object"),
        ({"hidden_states": {"layers": ["last"]}}, "pass true, false"),
        ({"hidden_states": {"layers": "2,18"}}, "pass true, false"),
        ({"hidden_states": {"tokens": "reply"}}, "pass true, false"),
        ({"hidden_states": "../x"}, "'../x': pass true, false"),
        ({"hidden_states": 1}, "1: pass true, false"),
        ({"hidden_states": True, "stream": True}, "hidden_states with stream: ask for one reply"),
        ({"hidden_states": True, "n": 2}, "hidden_states with n 2"),
        ({"hidden_states": True, "prompt": [PROMPT, PROMPT]}, "hidden_states with 2 prompts"),
    ],
    ids=str,
)
def test_wrong_requests(served: Served, folder: HiddenFolder, body: dict[str, Any], said: str) -> None:
    assert_refused(served, folder, {**ASKED, **body}, said)


def test_a_server_without_a_directory(engine: Engine, folder: HiddenFolder) -> None:
    with serving(engine) as served:
        for wanted in (True, {"layers": [1]}):
            assert_refused(served, folder, {**ASKED, "hidden_states": wanted}, "start it with --hidden-states-dir")
        assert served.post(COMPLETIONS, **{**ASKED, "hidden_states": False}).status_code == 200


def test_a_server_without_a_default(engine: Engine, folder: HiddenFolder) -> None:
    with serving(engine, hidden_folder=folder) as served:
        assert_refused(served, folder, {**ASKED, "hidden_states": True}, "the server has no --hidden-layers")
        assert_refused(served, folder, {**ASKED, "hidden_states": {}}, "the server has no --hidden-layers")
        assert served.post(COMPLETIONS, **BY_DEFAULT).json()["kv_transfer_params"] is None
        path_of(served.post(COMPLETIONS, **ASKED))


def test_default_layers_that_the_model_lacks(engine: Engine, folder: HiddenFolder) -> None:
    with pytest.raises(RequestError, match="hidden_layers has 99"):
        make_app(engine, ServeOptions("tiny", hidden_folder=folder, hidden_layers=(99,)))


# --- space and time --------------------------------------------------------------------------------------------------


def sample_bytes(served: Served, num_tokens: int = 40, num_layers: int = 3) -> int:
    """Size of the tensors of a file."""
    return num_tokens * (num_layers * served.engine.plan.model.hidden_size * 2 + 8)


def test_too_large_for_the_directory(served: Served, folder: HiddenFolder) -> None:
    """Whether by the field or by the default; the reply counts too, as long as it may become."""
    folder.max_bytes = 2 * sample_bytes(served)
    assert_refused(served, folder, {**ASKED, "prompt": prompt(200, 2)}, "--hidden-states-size allows")
    assert_refused(served, folder, {**BY_DEFAULT, "prompt": prompt(200, 2)}, "set hidden_states to false")
    long = {**ASKED, "max_tokens": 200}
    assert_refused(served, folder, {**long, "hidden_states": {"layers": LAYERS, "tokens": "all"}}, "239 tokens")
    path_of(served.post(COMPLETIONS, **{**long, "ignore_eos": True}))


def test_others_fill_the_directory(served: Served, folder: HiddenFolder) -> None:
    """Until one of them is read. What is not ours does not count."""
    folder.max_bytes = 2 * sample_bytes(served) + 2048
    (folder.directory / "hs_1.safetensors").write_bytes(bytes(folder.max_bytes))
    first, _ = path_of(served.post(COMPLETIONS, **ASKED)), path_of(served.post(COMPLETIONS, **ASKED))
    response = served.post(COMPLETIONS, **ASKED)
    assert response.headers["retry-after"] == "1"
    assert error_of(response, 507)["code"] == "insufficient_storage"
    assert_refused(served, folder, ASKED, "others that were not read yet fill", status=507)
    assert served.metrics()["hybridkv_requests_total|busy"] == 2
    first.unlink()
    path_of(served.post(COMPLETIONS, **ASKED))


def test_space_is_reserved_before_files_are_written(engine: Engine, folder: HiddenFolder, pace: Pace) -> None:
    with serving(engine, hidden_folder=folder) as served:
        folder.max_bytes = sample_bytes(served) + 1500
        client = Client(served, **ASKED)
        pace.wait()
        assert error_of(served.post(COMPLETIONS, **{**ASKED, "prompt": prompt(40, 3)}), 507)
        pace.run()
        assert client.read().startswith(b"HTTP/1.1 200")
        check_idle(served)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_what_is_not_read_goes(engine: Engine, folder: HiddenFolder) -> None:
    """File and lock; also locks that are left alone, and what a killed server left. No others, and none too early."""
    folder.ttl_s = 0.4
    old = [new_name() for _ in range(3)]
    ours = [old[0], f"{old[0]}.lock", f"{old[1]}.lock", f".{old[2]}.partial"]
    theirs = ["hs_1.safetensors", "x.lock", f"{old[0]}.bak", f"{old[1][:-12]}", "hidden_1.safetensors", ".x.partial"]
    for name in [*ours, *theirs]:
        (folder.directory / name).write_bytes(b"x")
        age(folder.directory / name, 1000)
    with serving(engine, hidden_folder=folder) as served:
        assert eventually(lambda: names(folder) == set(theirs))
        path = path_of(served.post(COMPLETIONS, **ASKED))
        assert path.exists()
        assert lock_of(path).exists()
        assert eventually(lambda: names(folder) == set(theirs))
        assert served.metrics()["hybridkv_hidden_states_expired_total"] == 4


def test_expired_files_make_room(served: Served, folder: HiddenFolder) -> None:
    """At once: not only when the next sweep is due."""
    folder.max_bytes = sample_bytes(served) + 1500
    path = path_of(served.post(COMPLETIONS, **ASKED))
    assert error_of(served.post(COMPLETIONS, **ASKED), 507)
    for one in (path, lock_of(path)):
        age(one, folder.ttl_s + 1)
    path_of(served.post(COMPLETIONS, **ASKED))
    assert not path.exists()
    assert not lock_of(path).exists()


def test_a_lock_stays_as_long_as_its_file(folder: HiddenFolder) -> None:
    """Here the file cannot be removed."""
    path = folder.path(new_name())
    path.mkdir()
    lock_of(path).touch()
    for one in (path, lock_of(path)):
        age(one, folder.ttl_s + 1)
    folder.sweep()
    assert lock_of(path).exists()
    assert folder.num_expired == 0


def test_metrics(served: Served) -> None:
    path = path_of(served.post(COMPLETIONS, **ASKED))
    found = served.metrics()
    assert found["hybridkv_hidden_states_written_total"] == found["hybridkv_hidden_states_files"] == 1
    assert found["hybridkv_hidden_states_bytes"] == path.stat().st_size
    assert 0 < path.stat().st_size - sample_bytes(served) < 1024


def test_files_outlive_the_server(engine: Engine, folder: HiddenFolder) -> None:
    """Their readers may be about to read them."""
    with serving(engine, hidden_folder=folder) as served:
        path = path_of(served.post(COMPLETIONS, **ASKED))
    assert names(folder) == {path.name, lock_of(path).name}


# --- failures --------------------------------------------------------------------------------------------------------


def assert_nothing_left(served: Served, folder: HiddenFolder) -> None:
    """Neither files nor reserved space."""
    check_idle(served)
    assert eventually(lambda: not folder._reserved)
    assert eventually(lambda: names(folder) == set())


def test_a_client_that_goes_away(engine: Engine, folder: HiddenFolder, pace: Pace) -> None:
    with serving(engine, hidden_folder=folder) as served:
        client = Client(served, **{**ASKED, "prompt": prompt(400, 2)})
        pace.advance(2)
        assert folder._reserved
        client.vanish()
        assert eventually(lambda: pace.num_asked == 1)
        pace.run()
        assert_nothing_left(served, folder)


def test_a_client_that_goes_away_while_its_file_is_written(
    served: Served, folder: HiddenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(served, **ASKED)

    def slow(*args: Any, **named: Any) -> int:
        client.vanish()
        gone = "hybridkv_requests_total|disconnected"
        assert eventually(lambda: served.metrics()[gone] == 1)
        return write_sample(*args, **named)

    monkeypatch.setattr("hybridkv.serve.hidden_folder.write_sample", slow)
    assert eventually(lambda: folder.num_written == 1)
    assert_nothing_left(served, folder)


def test_a_file_that_cannot_be_written(served: Served, folder: HiddenFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hybridkv.taps.files.write_all", full)
    assert "No space left on device" in error_of(served.post(COMPLETIONS, **ASKED), 500)["message"]
    assert_nothing_left(served, folder)
    monkeypatch.undo()
    path_of(served.post(COMPLETIONS, **ASKED))


def test_values_that_are_not_finite(served: Served, folder: HiddenFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's failure, not the client's."""
    monkeypatch.setattr(
        "hybridkv.serve.hidden_folder.encode", lambda rows, ids, dtype: encode(rows * torch.nan, ids, dtype)
    )
    assert "not finite" in error_of(served.post(COMPLETIONS, **ASKED), 500)["message"]
    assert_nothing_left(served, folder)


def test_a_directory_that_vanishes(served: Served, folder: HiddenFolder) -> None:
    folder.directory.rmdir()
    assert "No such file" in error_of(served.post(COMPLETIONS, **ASKED), 500)["message"]
    assert "hybridkv_hidden_states_files" not in served.metrics()
    assert not folder._reserved


# --- the directory ---------------------------------------------------------------------------------------------------


def test_a_symlink_is_followed_once(tmp_path: Path) -> None:
    """Later changes of the link do not lead files elsewhere."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert HiddenFolder(tmp_path / "link").directory == tmp_path / "real"


def test_a_planted_link_leads_nowhere(
    served: Served, folder: HiddenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others who may write to the directory see the lock, and could be faster than the server."""
    victim = tmp_path / "victim"
    victim.write_text("precious")

    def plant(*args: Any) -> Any:
        [lock] = folder.directory.glob("*.lock")
        (folder.directory / f".{lock.name.removesuffix('.lock')}.partial").symlink_to(victim)
        return encode(*args)

    monkeypatch.setattr("hybridkv.serve.hidden_folder.encode", plant)
    error_of(served.post(COMPLETIONS, **ASKED), 500)
    assert victim.read_text() == "precious"
    assert_nothing_left(served, folder)


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=f"cannot write hidden states to {wrong}: .*; name another directory"):
            HiddenFolder(wrong)


def test_many_at_once(served: Served, folder: HiddenFolder) -> None:
    clients = [Client(served, **{**ASKED, "prompt": prompt(20 + number, number)}) for number in range(12)]
    texts = [client.read() for client in clients]
    assert all(text.startswith(b"HTTP/1.1 200") for text in texts)
    lengths = sorted(len(load_file(path)["token_ids"]) for path in folder.directory.glob("*.safetensors"))
    assert lengths == list(range(20, 32))
