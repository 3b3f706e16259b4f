"""Request bodies and replies of `/tokenize` and `/detokenize`, in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from hybridkv.engine import Engine, Prompt
from hybridkv.errors import RequestError
from hybridkv.serve.messages import ChatPrompt
from hybridkv.serve.replies import DetokenizeReply, TokenizeReply
from hybridkv.serve.requests import TokenIds
from hybridkv.serve.unsupported import check_extras


class _TokenRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="The served model's name, or an adapter's; may be left out.")


class _Tokenize(_TokenRequest):
    return_token_strs: bool | None = Field(None, description="Add every token as the vocabulary writes it.")

    def _reply(self, engine: Engine, prompt: Prompt) -> TokenizeReply:
        tokenizer: Any = engine.tokenizer  # not None: it has made the prompt
        tokens = prompt.token_ids
        strs = tokenizer.convert_ids_to_tokens(tokens) if self.return_token_strs else None
        return TokenizeReply(tokens=tokens, count=len(tokens), max_model_len=engine.max_model_len, token_strs=strs)


class TokenizeText(_Tokenize):
    """A body of `/tokenize` with a text."""

    source: ClassVar[str] = "prompt"
    prompt: str
    add_special_tokens: bool | None = Field(
        None, description="Add those that the tokenizer puts around texts. Default: true."
    )

    def reply(self, engine: Engine) -> TokenizeReply:
        check_extras(self.model_extra or {}, known=type(self).model_fields)
        return self._reply(engine, engine.prepare(self.prompt, add_special_tokens=self.add_special_tokens is not False))


class TokenizeChat(_Tokenize, ChatPrompt):
    """A body of `/tokenize` with messages, which are rendered with the chat template."""

    def reply(self, engine: Engine) -> TokenizeReply:
        extras = self.model_extra or {}
        if extras.get("prompt") is not None:
            raise RequestError("prompt with messages: leave one of both out", "prompt")
        check_extras(extras, known=type(self).model_fields)
        return self._reply(engine, self.render(engine))


class DetokenizeRequest(_TokenRequest):
    """A body of `/detokenize`."""

    source: ClassVar[str] = "tokens"
    tokens: TokenIds
    skip_special_tokens: bool | None = Field(None, description="Default: false.")

    def reply(self, engine: Engine) -> DetokenizeReply:
        check_extras(self.model_extra or {}, known=type(self).model_fields)
        return DetokenizeReply(
            prompt=engine.detokenize(self.tokens, skip_special_tokens=bool(self.skip_special_tokens))
        )


def _kind(body: object) -> str:
    """The kind of a body. It is chosen before validation, so that errors fit what the client meant."""
    is_chat = isinstance(body, TokenizeChat) or (isinstance(body, Mapping) and body.get("messages") is not None)
    return TokenizeChat.__name__ if is_chat else TokenizeText.__name__


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag(TokenizeText.__name__)] | Annotated[TokenizeChat, Tag(TokenizeChat.__name__)],
    Discriminator(_kind),
]
