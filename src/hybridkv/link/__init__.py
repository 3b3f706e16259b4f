"""Moves KV between two engines: one computes prompts, the other decodes."""
