"""Request bodies of `/v1/messages` and `/v1/messages/count_tokens`, and their conversion to chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from hybridkv.chats import TOOLS, Joined, Mark, Part, join_parts, parse_lifetime
from hybridkv.engine import Engine, Prompt, SamplingParams
from hybridkv.engine.sampling.params import MAX_STOPS, MAX_TOKEN_ID
from hybridkv.errors import RequestError
from hybridkv.serve.anthropic_replies import TokenCount
from hybridkv.serve.messages import MAX_BREAKPOINTS, MAX_MESSAGES
from hybridkv.serve.requests import Asked

MAX_TOOLS = 1024
_DEFAULT_LIFETIME = "5m"
_BILLING = "x-anthropic-billing-header"
"""Begins a system block that Claude Code sends. With it no two prompts would begin alike."""
_REFUSED = {"container": "nothing is executed here", "mcp_servers": "nothing is called from here"}
"""Fields that would change the reply, and why they are refused. Other unknown fields are ignored."""


class _Loose(BaseModel):
    """An object with fields that are of no meaning here."""

    model_config = ConfigDict(extra="allow", strict=True)


class CacheControl(_Loose):
    type: Literal["ephemeral"]
    ttl: str | None = Field(None, description="5m (the default) or 1h: a hint for what is evicted first.")

    def lifetime_s(self, place: str) -> float:
        return parse_lifetime(self.ttl or _DEFAULT_LIFETIME, f"{place}.cache_control.ttl")


class TextBlock(_Loose):
    type: str
    text: str | None = None
    cache_control: CacheControl | None = Field(None, description="A breakpoint at the end of this block.")


class Block(TextBlock):
    """A block of a message: text, tool_use, tool_result or thinking."""

    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    thinking: str | None = None


class AnthropicMessage(_Loose):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class Tool(_Loose):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = Field(None, description="A breakpoint after this tool.")

    def for_template(self, place: str) -> dict[str, Any]:
        if self.type not in (None, "custom") or self.input_schema is None:
            raise RequestError(
                f"{place} is a tool of type {self.type!r:.80}: only tools with a name and an input_schema are served, "
                "which the client runs",
                place,
            )
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ToolChoice(_Loose):
    type: Literal["auto", "none", "any", "tool"]


class Thinking(_Loose):
    type: str


class _Chat(NamedTuple):
    """A chat as the chat template gets it."""

    messages: list[dict[str, Any]]
    marks: list[Mark]


class CountRequest(_Loose):
    """Body of `/v1/messages/count_tokens`."""

    source: ClassVar[str] = "messages"
    model: str | None = Field(None, description="The served model's name, or an adapter's; may be left out.")
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = Field(None, description="auto or none: no reply can be forced to call a tool.")
    thinking: Thinking | None = Field(None, description="disabled, or else: `enable_thinking` of the chat template.")
    cache_control: CacheControl | None = Field(None, description="A breakpoint at the end of the last message.")

    def reply(self, engine: Engine) -> TokenCount:
        return TokenCount(input_tokens=self.render(engine).num_tokens)

    def render(self, engine: Engine) -> Prompt:
        """The prompt. If the client names breakpoints, it has these alone; else those after messages."""
        self._refuse()
        chat, options = self._chat(), self._options()
        _check_tools(engine, options)
        marks, continues = chat.marks[-MAX_BREAKPOINTS:], chat.messages[-1]["role"] == "assistant"
        return engine.render_chat(
            chat.messages,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            chat_template_kwargs=options,
            marks=marks,
            has_ends=not marks,
        )

    def _refuse(self) -> None:
        for name, reason in _REFUSED.items():
            if (self.model_extra or {}).get(name):
                raise RequestError(f"{name} is not supported: {reason}; leave it out", name)
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
            message = f"tool_choice is of type {self.tool_choice.type!r}: replies are free text; pass auto or none"
            raise RequestError(message, "tool_choice")

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.tools:
            options["tools"] = [tool.for_template(f"tools.{number}") for number, tool in enumerate(self.tools)]
        if self.thinking is not None:
            options["enable_thinking"] = self.thinking.type != "disabled"
        return options

    def _chat(self) -> _Chat:
        chat = _Chat([], [])
        for number, tool in enumerate(self.tools or (), 1):
            if tool.cache_control is not None:
                chat.marks.append(Mark(TOOLS, number, tool.cache_control.lifetime_s(f"tools.{number - 1}")))
        if self.system:
            _add(chat, {"role": "system"}, _system(self.system))
        for number, message in enumerate(self.messages):
            for head, content in _split(message, f"messages.{number}"):
                _add(chat, head, content)
        if self.cache_control is not None:
            last = len(chat.messages) - 1
            chat.marks.append(Mark(last, None, self.cache_control.lifetime_s("the body")))
        return chat


class MessagesRequest(CountRequest):
    """Body of `/v1/messages`."""

    num_prompts: ClassVar[int] = 1
    wants_usage: ClassVar[bool] = True
    return_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    repeated: ClassVar[None] = None
    prompt_cache_key: ClassVar[None] = None
    max_tokens: int = Field(ge=1, le=MAX_TOKEN_ID)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOPS)
    stream: bool | None = None
    cache_salt: str | None = Field(
        None, max_length=1024, description="Requests with different salts never share anything in the cache."
    )

    def params(self) -> SamplingParams:
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "stop": self.stop_sequences}
        named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=self.max_tokens, **named)

    def prepare(self, engine: Engine) -> Asked:
        return Asked([self.render(engine)])


def _add(chat: _Chat, head: Mapping[str, Any], content: Joined) -> None:
    chat.marks.extend(content.marks_of(len(chat.messages)))
    chat.messages.append({**head, "content": content.text})


def _system(system: str | Sequence[TextBlock]) -> Joined:
    """The system message, without a block for the provider's accounts, which is another one in every request."""
    if not isinstance(system, str):
        system = [block for block in system if not (block.text or "").startswith(_BILLING)]
    return _joined(system, "system")


def _joined(content: str | Sequence[TextBlock] | None, place: str) -> Joined:
    if content is None or isinstance(content, str):
        return Joined(content or "")
    return join_parts((_part(block, f"{place}.{number}") for number, block in enumerate(content)), place)


def _part(block: TextBlock, place: str) -> Part:
    marked = block.cache_control
    return Part(block.type, block.text, marked is not None, None if marked is None else marked.lifetime_s(place))


def _split(message: AnthropicMessage, place: str) -> Iterator[tuple[dict[str, Any], Joined]]:
    """The messages of the chat template for one of the client's: results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role}, Joined(message.content)
        return
    texts: list[Part] = []
    calls: list[dict[str, Any]] = []
    thoughts = ""
    is_marked_last, lifetime_s = False, None
    for number, block in enumerate(message.content):
        name = f"{place}.content.{number}"
        part = _part(block, name)
        if block.type == "tool_result":
            if texts:
                yield {"role": message.role}, join_parts(texts, f"{place}.content")
                texts = []
            head = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
            result = _joined(block.content, f"{name}.content")
            yield head, result._replace(marks=[*result.marks, (None, part.lifetime_s)]) if part.is_marked else result
        elif block.type == "tool_use":
            if block.name is None or block.input is None:
                raise RequestError(f"{name} is a tool_use without a name and an input: give it both", name)
            function = {"name": block.name, "arguments": block.input}
            calls.append({"type": "function", "id": block.id or "", "function": function})
            is_marked_last, lifetime_s = part.is_marked, part.lifetime_s
        elif block.type in ("thinking", "redacted_thinking"):
            thoughts += block.thinking or ""
        else:
            texts.append(part)
    if texts or calls or thoughts or not message.content:
        own: dict[str, Any] = {"role": message.role}
        if calls:
            own["tool_calls"] = calls
        if thoughts:
            own["reasoning_content"] = thoughts
        content = join_parts(texts, f"{place}.content")
        if is_marked_last:
            content = content._replace(marks=[*content.marks, (None, lifetime_s)])
        yield own, content


def _check_tools(engine: Engine, options: Mapping[str, Any]) -> None:
    """Refuse tools if the chat template does not write them: the model would not know of them."""
    if "tools" not in options:
        return
    question = [{"role": "user", "content": "0"}]
    plain = engine.render_chat(question)
    if engine.render_chat(question, chat_template_kwargs={"tools": options["tools"][:1]}).ids == plain.ids:
        raise RequestError("tools: this model's chat template does not know them; leave them out", "tools")
