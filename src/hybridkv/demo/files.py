"""Files that come with the package: the demo model, a document, and questions about the document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from hybridkv.errors import InputError

DEMO_NAME = "hybridkv-demo"
"""Directory of the model, and so the name that the server gives it."""

_HERE = Path(__file__).resolve().parent
_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class Question(NamedTuple):
    """A question about the document. An answer is right if it contains `expected`."""

    question: str
    expected: str


def demo_model() -> Path:
    """Directory of the demo model. Nothing is built, copied or downloaded."""
    directory = _HERE / DEMO_NAME
    missing = [name for name in _MODEL_FILES if not (directory / name).is_file()]
    if missing:
        raise InputError(
            f"the demo model in {directory} lacks {', '.join(missing)}: install hybridkv again, or name a model of "
            "your own"
        )
    return directory


def demo_document() -> str:
    """The text that the questions are about."""
    return (_HERE / "document.txt").read_text(encoding="utf-8").strip()


def demo_questions() -> list[Question]:
    """Questions about the document, with what each answer must contain."""
    return [Question(**one) for one in json.loads((_HERE / "questions.json").read_text(encoding="utf-8"))]
