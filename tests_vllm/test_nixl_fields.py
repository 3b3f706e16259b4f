"""docs/disaggregation-vllm.md names the fields that vLLM's NixlConnector exchanges: they must be those of this vLLM."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

PAGE = Path(__file__).parent.parent / "docs" / "disaggregation-vllm.md"
BY_OTHERS = {"remote_prefill_cached_tokens", "prompt_token_ids"}
"""Fields that vLLM's scheduler and routers add; the connector's own reply does not have them."""


def documented_fields() -> set[str]:
    table = PAGE.read_text().split("| field |", 1)[1].split("\n\n", 1)[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def replied_fields() -> set[str]:
    source = textwrap.dedent(inspect.getsource(NixlPullConnectorScheduler.request_finished))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    [reply] = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "dict"]
    return {keyword.arg for keyword in reply.keywords if keyword.arg is not None}


def test_page_names_the_fields_of_a_prefill_reply() -> None:
    assert documented_fields() == replied_fields() | BY_OTHERS


def test_page_names_the_version_of_the_protocol() -> None:
    assert f"`NIXL_CONNECTOR_VERSION` {metadata.NIXL_CONNECTOR_VERSION})" in PAGE.read_text()


def test_decoder_needs_the_fields_that_the_page_says() -> None:
    source = inspect.getsource(metadata.NixlConnectorMetadata.add_new_req_to_recv)
    needed = set(re.findall(r'kv_transfer_params\["(\w+)"\]', source))
    sentence = PAGE.read_text().split("vLLM's decoder needs", 1)[1].split(";", 1)[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == needed
