"""Puts examples/train_demo on the path: its modules import each other by their bare names, as scripts do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "train_demo"))
