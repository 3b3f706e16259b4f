"""Families whose layers keep what those of another family keep: each goes along two of the main paths, one drawn.

The others of the zoo go along every path. With HYBRIDKV_FAMILIES=all these do, too (`make prove-families`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.covering import SEED_VARIABLE
from tests.devices import DEVICE, uses_device
from tests.engine import test_correctness as correctness
from tests.engine import test_hidden_states as hidden_states
from tests.engine.test_streaming import ask, check_readable, engine_of, url
from tests.engine.zoo import ALL, FAMILIES, KIN

pytestmark = uses_device

GO_ALONG = Callable[[str, str], None]


def a_restarted_engine_says_the_same_with_less_work(family: str, device: str) -> None:
    said = []
    with TemporaryDirectory() as folder:
        for expected in (0, 288):
            with engine_of(family, store=url(Path(folder)), stream="layerwise", device=device) as engine:
                result = ask(engine)
                said.append(result.token_ids)
                assert result.cached_tokens == expected
                engine.check_integrity()
        assert said[0] == said[1]
        assert check_readable(Path(folder))


FIRST: GO_ALONG = correctness.test_ragged_requests_with_chunked_prefill_beside_decodes
OTHERS: list[GO_ALONG] = [
    correctness.test_a_prompt_sent_again_and_a_conversation_that_goes_on,
    correctness.test_breakpoints_inside_a_prefill_and_siblings,
    correctness.test_preemption_eviction_and_compaction_in_a_tiny_arena,
    hidden_states.test_chunks_beside_others,
    a_restarted_engine_says_the_same_with_less_work,
]


def paths_of(family: str) -> list[GO_ALONG]:
    if FAMILIES is ALL:
        return [FIRST, *OTHERS]
    return [FIRST, random.Random(f"{os.environ.get(SEED_VARIABLE, 0)} {family}").choice(OTHERS)]


@pytest.mark.parametrize(
    ("family", "path"),
    [
        pytest.param(family, path, id=f"{family}-{path.__name__.removeprefix('test_')}")
        for family in KIN
        for path in paths_of(family)
    ],
)
def test_every_logit_is_that_of_the_stock_model(family: str, path: GO_ALONG) -> None:
    path(family, DEVICE)
