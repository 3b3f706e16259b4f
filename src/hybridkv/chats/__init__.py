"""Chats as text and tokens, through the chat template of any tokenizer object. Knows no engine, no torch."""

from hybridkv.chats.messages import NEED_CONTENT, check_template_options, join_parts, missing_content, read_messages
from hybridkv.chats.recognition import ChatStyle
from hybridkv.chats.rendering import ChatText, ChatTokens, Message, check_text, render_chat, tokenize_chat, write_chat

__all__ = [
    "NEED_CONTENT",
    "ChatStyle",
    "ChatText",
    "ChatTokens",
    "Message",
    "check_template_options",
    "check_text",
    "join_parts",
    "missing_content",
    "read_messages",
    "render_chat",
    "tokenize_chat",
    "write_chat",
]
