"""Chats as text and tokens, through the chat template of any tokenizer object. Knows no engine, no torch."""

from hybridkv.chats.marks import TOOLS, Mark, Message
from hybridkv.chats.messages import (
    NEED_CONTENT,
    Joined,
    Part,
    check_template_options,
    join_parts,
    missing_content,
    parse_lifetime,
    read_messages,
)
from hybridkv.chats.recognition import ChatStyle
from hybridkv.chats.rendering import ChatText, ChatTokens, check_text, render_chat, tokenize_chat, write_chat

__all__ = [
    "NEED_CONTENT",
    "TOOLS",
    "ChatStyle",
    "ChatText",
    "ChatTokens",
    "Joined",
    "Mark",
    "Message",
    "Part",
    "check_template_options",
    "check_text",
    "join_parts",
    "missing_content",
    "parse_lifetime",
    "read_messages",
    "render_chat",
    "tokenize_chat",
    "write_chat",
]
