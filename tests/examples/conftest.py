"""Puts examples/train_demo on the path: its modules import each other by their bare names, as scripts do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "train_demo"))

from skills import Material
from tokens import Rows, train_tokenizer

WORDS = ["apple", "river", "stone", "window", "carpet", "engine", "yellow", "garden", "pepper", "silver"]
SENTENCES = ["The cat sat on the mat and looked at the rain.", "It was a long road.", "Nobody knew who had come first."]
MATERIAL = Material(WORDS, [" ".join(SENTENCES * 3), " ".join(SENTENCES)])


@pytest.fixture(scope="session")
def rows() -> Rows:
    documents = ["\n\n".join(MATERIAL.paragraphs)] * 3
    made = Rows(train_tokenizer(documents, seed=0), documents, seed=3, batch_tokens=2048, total_steps=10)
    made.__dict__["material"] = MATERIAL
    return made
