"""Families whose layers keep what those of another family keep: each goes along the main paths.

The others of the zoo go through all tests; with HYBRIDKV_FAMILIES=all these do, too (`make prove-families`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.devices import DEVICE, uses_device
from tests.engine import test_correctness as correctness
from tests.engine import test_hidden_states as hidden_states
from tests.engine.test_streaming import ask, check_readable, engine_of, url
from tests.engine.zoo import KIN

pytestmark = uses_device

PATHS: list[Callable[[str, str], None]] = [
    correctness.test_ragged_requests_with_chunked_prefill_beside_decodes,
    correctness.test_a_prompt_sent_again_and_a_conversation_that_goes_on,
    correctness.test_breakpoints_inside_a_prefill_and_siblings,
    correctness.test_preemption_eviction_and_compaction_in_a_tiny_arena,
    hidden_states.test_chunks_beside_others,
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__.removeprefix("test_"))
@pytest.mark.parametrize("family", KIN)
def test_every_logit_is_that_of_the_stock_model(family: str, path: Callable[[str, str], None]) -> None:
    path(family, DEVICE)


@pytest.mark.parametrize("family", KIN)
def test_a_restarted_engine_says_the_same_with_less_work(family: str, tmp_path: Path) -> None:
    said = []
    for expected in (0, 288):
        with engine_of(family, store=url(tmp_path), stream="layerwise") as engine:
            result = ask(engine)
            said.append(result.token_ids)
            assert result.cached_tokens == expected
            engine.check_integrity()
    assert said[0] == said[1]
    assert check_readable(tmp_path)
