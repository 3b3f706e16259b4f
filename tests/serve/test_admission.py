"""Samples are counted, clients take turns, and no client keeps others out."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from hybridkv import Engine, InputError, RequestError
from hybridkv.serve import Clients
from hybridkv.serve.access import Caller
from hybridkv.serve.connection_limits import peer_of
from hybridkv.serve.jobs import Admission, TooBusyError
from tests.engine.zoo import prompt
from tests.serve.serving import Client, Pace, Served, check_idle, error_of, eventually, serving

COMPLETIONS = "/v1/completions"
BIG = [prompt(6, seed) for seed in range(128)]


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch) -> list[Admission]:
    """Return the admissions of all servers that start in the test."""
    made: list[Admission] = []

    def make(max_waiting: int) -> Admission:
        made.append(Admission(max_waiting))
        return made[-1]

    monkeypatch.setattr("hybridkv.serve.service.Admission", make)
    return made


def running(engine: Engine) -> list[int]:
    """Prompt lengths of the running samples."""
    return [one.request.prompt_tokens for one in engine._core.scheduler.running]


# --- turns ------------------------------------------------------------------------------------------------------------


def test_a_small_request_beside_one_of_16384_samples(engine: Engine, pace: Pace) -> None:
    def key(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {name}"}

    with serving(engine, max_waiting=16384, api_keys=("big", "small")) as served:
        big = Client(served, headers=key("big"), prompt=BIG, n=128, max_tokens=6)
        assert eventually(lambda: pace.num_waiting == 128)
        pace.advance(3)
        assert running(engine) == [6] * 8
        small = Client(served, headers=key("small"), prompt=prompt(5, 900), max_tokens=2)
        assert eventually(lambda: pace.num_asked == 1)
        pace.advance()
        while len(running(engine)) == 8:
            pace.advance()
        steps = 0
        while 5 not in running(engine):
            pace.advance()
            steps += 1
            assert steps <= 2
        big.vanish()
        pace.run()
        assert small.read().startswith(b"HTTP/1.1 200")
        served.http.headers.update(key("small"))
        check_idle(served)


@pytest.mark.parametrize(("proxies", "client"), [((), "127.0.0.1"), (("127.0.0.0/8",), "203.0.113.7")])
def test_an_address_that_a_proxy_names_counts_if_the_proxy_is_trusted(
    proxies: tuple[str, ...], client: str, engine: Engine, pace: Pace
) -> None:
    with serving(engine, clients=Clients(proxies)) as served:
        sent = Client(served, headers={"X-Forwarded-For": "203.0.113.7"}, prompt=prompt(5, 1), max_tokens=2)
        assert eventually(lambda: pace.num_waiting == 1)
        pace.advance()
        assert [one.request.client for one in engine._core.scheduler.running] == [client]
        sent.vanish()
        pace.run()
        check_idle(served)


# --- places -----------------------------------------------------------------------------------------------------------


def test_a_prompt_gives_the_places_of_its_samples_back_with_their_first_tokens(
    engine: Engine, pace: Pace, admissions: list[Admission]
) -> None:
    """A step has 64 tokens: room for the first prompt and a part of the second."""
    with serving(engine) as served:
        client = Client(served, prompt=[prompt(50, 1), prompt(50, 2)], n=3, max_tokens=4)
        assert eventually(lambda: pace.num_waiting == 2)
        assert admissions[0].num_waiting == 6
        pace.advance()
        assert eventually(lambda: admissions[0].num_waiting == 3)
        pace.advance()
        assert eventually(lambda: admissions[0].num_waiting == 0)
        pace.run()
        assert client.read().startswith(b"HTTP/1.1 200")
        check_idle(served)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_gives_all_places_back_at_once(
    stream: bool, engine: Engine, pace: Pace, admissions: list[Admission]
) -> None:
    with serving(engine, max_waiting=1024) as served:
        big = Client(served, prompt=BIG, n=8, max_tokens=6, stream=stream)
        assert eventually(lambda: pace.num_waiting == 128)
        assert admissions[0].num_waiting == 1024
        pace.wait()
        error = error_of(served.post(COMPLETIONS, prompt="x"), 429)
        assert "1,024 samples are waiting" in error["message"]
        big.vanish()
        assert eventually(lambda: admissions[0].num_waiting == 0)
        assert eventually(lambda: pace.num_waiting == 128 + 128)  # and as many are to be aborted
        pace.advance()
        assert not engine._core.has_work
        pace.run()
        assert served.post(COMPLETIONS, prompt="x").status_code == 200
        check_idle(served)


def test_a_request_that_can_never_wait_is_no_matter_of_patience(served: Served) -> None:
    response = served.post(COMPLETIONS, prompt=["x"] * 5, n=4)
    error = error_of(response, 400)
    assert error["message"] == (
        "5 prompts with n 4 would be 20 samples, and at most 16 may wait: ask for less in one request, or start the "
        "server with a larger --max-waiting"
    )
    assert error["param"] == "prompt"
    assert "retry-after" not in response.headers
    assert served.post(COMPLETIONS, prompt="x", n=17).json()["error"]["param"] == "n"
    assert served.post(COMPLETIONS, prompt=["x"] * 4, n=4, max_tokens=1).status_code == 200


def test_a_client_with_less_than_its_share_is_let_in_though_another_fills_the_queue() -> None:
    admission = Admission(12)
    big = admission.enter("a", 4, 3)
    with pytest.raises(TooBusyError, match="12 samples are waiting, and at most 12 may"):
        admission.enter("a", 1, 1)
    with pytest.raises(TooBusyError):
        admission.enter("b", 7, 1)
    admission.enter("b", 2, 3)
    with pytest.raises(TooBusyError):
        admission.enter("b", 1, 1)
    third = admission.enter("c", 1, 4)
    big.called(3)
    assert admission.num_waiting == 9 + 6 + 4
    big.end()
    big.end()
    third.end()
    assert admission.num_waiting == 6
    with pytest.raises(TooBusyError):
        admission.enter("c", 7, 1)
    admission.enter("c", 6, 1)
    with pytest.raises(RequestError, match="1 prompt with n 13 would be 13 samples"):
        admission.enter("d", 1, 13)


# --- clients ----------------------------------------------------------------------------------------------------------


def request_from(host: str, *forwarded: str, owner: str = "") -> Request:
    headers = [(b"x-forwarded-for", one.encode()) for one in forwarded]
    state = {"caller": Caller(owner, is_operator=False)}
    return Request({"type": "http", "headers": headers, "client": (host, 1), "state": state})


@pytest.mark.parametrize(
    ("host", "forwarded", "client"),
    [
        ("192.0.2.1", ("203.0.113.7",), "192.0.2.1"),  # not a proxy: anyone can say so
        ("10.0.0.1", (), "10.0.0.1"),
        ("10.0.0.1", ("203.0.113.7",), "203.0.113.7"),
        ("10.0.0.1", ("198.51.100.1, 203.0.113.7",), "203.0.113.7"),  # what the client sent itself is on the left
        ("10.0.0.1", ("198.51.100.1, 203.0.113.7, 10.0.0.2",), "203.0.113.7"),
        ("10.0.0.1", ("198.51.100.1", "203.0.113.7 ,10.0.0.2"), "203.0.113.7"),
        ("10.0.0.1", ("10.0.0.3, 10.0.0.2",), "10.0.0.3"),
        ("10.0.0.1", ("203.0.113.7, unknown",), "10.0.0.1"),
        ("fd00::1", ("2001:DB8::7",), "2001:db8::/64"),
        ("::ffff:10.0.0.1", ("203.0.113.7, ::ffff:10.0.0.2",), "203.0.113.7"),  # a server that listens on ::
        ("", ("203.0.113.7",), ""),
    ],
)
def test_a_client_without_a_key_is_the_address_that_called_the_last_trusted_proxy(
    host: str, forwarded: tuple[str, ...], client: str
) -> None:
    clients = Clients(["10.0.0.0/8", "fd00::1"])
    assert clients.client_of(request_from(host, *forwarded)) == client
    assert Clients().client_of(request_from(host, *forwarded)) == peer_of(host)


def test_a_client_with_a_key_is_its_key() -> None:
    found = {Clients().client_of(request_from(host, owner="digest")) for host in ("192.0.2.1", "192.0.2.2")}
    assert found == {"digest"}


def test_a_proxy_that_is_no_address_is_refused() -> None:
    with pytest.raises(InputError, match=r"trusted proxy: 'gate' does not .*; write an address or a network, such as"):
        Clients(["gate"])
