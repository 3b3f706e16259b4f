"""Logits into tokens."""
