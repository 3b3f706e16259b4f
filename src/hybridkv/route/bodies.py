"""The bodies that a router sends to workers. The field `kv_transfer_params` has the form of vLLM's NixlConnector."""

from __future__ import annotations

import json
from typing import Any

from hybridkv.errors import RequestError

Body = dict[str, Any]
_DO_REMOTE_DECODE: Body = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def parse_body(content: bytes) -> Body:
    """A request's body. What a client says about transfers is left out: it could name any host."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError("the body cannot be parsed: send JSON in UTF-8") from error
    if not isinstance(body, dict):
        raise RequestError("the body is no JSON object: send one")
    body.pop("kv_transfer_params", None)
    return body


def needs_no_prefill_worker(body: Body) -> bool:
    """Whether a decode worker has to compute the prompt itself: for several prompts, or for more than their KV."""
    prompt = body.get("prompt")
    has_several = isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], (str, list))
    reads_prompt = bool(body.get("echo")) and body.get("logprobs") is not None
    return has_several or reads_prompt or body.get("prompt_logprobs") is not None or bool(body.get("hidden_states"))


def prefill_body(body: Body, is_chat: bool, transfer_id: str | None = None) -> Body:
    """The same request for one token, whose KV is kept for another engine. `transfer_id`: under a chosen name."""
    params = _DO_REMOTE_DECODE if transfer_id is None else {"do_remote_decode": True, "transfer_id": transfer_id}
    sent = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
    if is_chat or "max_completion_tokens" in body:
        sent["max_completion_tokens"] = 1
    sent.pop("stream_options", None)
    if isinstance(body.get("min_tokens"), int):  # more than max_tokens would be an error; 0 or not matters to the token
        sent["min_tokens"] = min(body["min_tokens"], 1)
    return sent


def decode_body(body: Body, params: Body | None) -> Body:
    """The request with what the prefill worker said of its KV. None: the decode worker computes the prompt."""
    return body if params is None else {**body, "kv_transfer_params": params}


def early_params(transfer_id: str, host: str, port: int) -> Body:
    """What a decode worker needs to find the KV of a prefill that may not have begun."""
    return {"do_remote_prefill": True, "transfer_id": transfer_id, "remote_host": host, "remote_port": port}


def transfer_params(content: bytes) -> Body | None:
    """The `kv_transfer_params` of a prefill worker's reply, or None if it keeps nothing for another engine."""
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        return None
    params = reply.get("kv_transfer_params") if isinstance(reply, dict) else None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None
