"""Prompts that a producer cannot keep to their end are not offered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridkv import Engine, InputError, SamplingParams
from hybridkv.link.link import LinkOptions
from tests.engine.zoo import fresh, prompt


@pytest.fixture
def link(tmp_path: Path) -> LinkOptions:
    (tmp_path / "secret").write_text("a secret of tests, long enough")
    return LinkOptions(role="prefill", secret_file=tmp_path / "secret")


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_prompt_whose_end_was_not_kept_is_not_offered(
    family: str, link: LinkOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}, "progress": False}
    params = SamplingParams(max_tokens=8, temperature=0)
    with Engine(fresh(family), memory="8MiB", device="cpu", link=link) as engine:
        cache = engine._core.cache
        [offered] = engine.generate([prompt(40, 1)], params, **asked)
        assert offered.kv_transfer_params is not None
        pin = cache.pin
        monkeypatch.setattr(cache, "pin", lambda *args, limit, **options: pin(*args, limit=limit - 1, **options))
        [short] = engine.generate([prompt(40, 2)], params, **asked)
        assert short.kv_transfer_params is None
        assert len(short.token_ids) == 1
        assert engine.stats().memory.pinned_prefixes == 1
        assert engine.link is not None
        assert engine.link.producer is not None
        assert engine.link.producer.num_outbound == 1
        engine.check_integrity()


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_offers_that_nobody_collects_keep_to_their_share(family: str, link: LinkOptions) -> None:
    """The oldest are given up. The newest can be collected, and other requests run beside."""
    params, asked = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), {"do_remote_decode": True}
    link = replace(link, offer_share=0.25)
    with Engine(fresh(family), memory="2MiB", device="cpu", link=link) as producer:
        assert producer.link is not None
        cache, stats = producer._core.cache, producer.link.stats
        other = replace(link, role="decode", peers=[f"http://127.0.0.1:{producer.link.port}"])
        offered = []
        for seed in range(24):
            tokens = prompt(200, seed)
            [result] = producer.generate([tokens], params, kv_transfer_params=asked, progress=False)
            assert result.kv_transfer_params is not None
            offered.append((tokens, result.kv_transfer_params))
            producer.check_integrity()
        waiting = len(cache.pins)
        assert 1 <= waiting < 24
        assert cache.pinned_slabs() <= cache.layout.num_slabs / 4
        assert stats.snapshot().failures == {"share": 24 - waiting}
        with Engine(fresh(family), memory="8MiB", device="cpu", link=other) as consumer:
            for (tokens, given), is_there in ((offered[-waiting], True), (offered[-waiting - 1], False)):
                [reply] = consumer.generate([tokens], params, kv_transfer_params=given, progress=False)
                assert (reply.received is not None) is is_there


def test_an_offer_larger_than_the_share_is_kept_alone(link: LinkOptions) -> None:
    asked: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}, "progress": False}
    params = SamplingParams(max_tokens=4, temperature=0)
    with Engine(fresh("llama"), memory="2MiB", device="cpu", link=replace(link, offer_share=0.01)) as engine:
        for seed in (1, 2):
            [offered] = engine.generate([prompt(200, seed)], params, **asked)
            assert offered.kv_transfer_params is not None
            assert engine.stats().memory.pinned_prefixes == 1
        assert engine.link is not None
        assert engine.link.stats.failures == {"share": 1}


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(link: LinkOptions, share: float) -> None:
    with pytest.raises(InputError, match="link offer share"):
        replace(link, offer_share=share).check()


def test_a_missing_nixl_is_told_before_a_model_is_loaded(link: LinkOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.link.agent._PACKAGES", ("no_such_nixl",))
    with pytest.raises(InputError, match=r"pip install 'hybridkv\[link\]'"):
        Engine("no model is loaded", link=link)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_prompt_that_comes_without_first_tokens_is_continued(
    family: str, link: LinkOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.engine.linking.prefills.first_tokens", lambda request: [])
    params, tokens = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), prompt(40, 1)
    with Engine(fresh(family), memory="8MiB", device="cpu", link=link) as producer:
        assert producer.link is not None
        peers = [f"http://127.0.0.1:{producer.link.port}"]
        other = replace(link, role="decode", peers=peers)
        with Engine(fresh(family), memory="8MiB", device="cpu", link=other) as consumer:
            asked = {"do_remote_decode": True}
            [offered] = producer.generate([tokens], params, kv_transfer_params=asked, progress=False)
            [result] = consumer.generate(
                [tokens], params, kv_transfer_params=offered.kv_transfer_params, progress=False
            )
            assert result.received is not None
            [alone] = consumer.generate([tokens], params, cache_salt="alone", progress=False)
            assert result.token_ids == alone.token_ids
            consumer.check_integrity()
