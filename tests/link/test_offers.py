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
