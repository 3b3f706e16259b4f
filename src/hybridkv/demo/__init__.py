"""The demo: a small trained hybrid model that comes with the package, and the acts of `hybridkv demo`.

Importing this package imports no torch.
"""

from hybridkv.demo.files import Question, demo_document, demo_model, demo_questions

__all__ = ["Question", "demo_document", "demo_model", "demo_questions"]
