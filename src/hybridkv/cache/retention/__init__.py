"""Retention: checkpoint and eviction policies, the eviction queue, and the reuse history they learn from."""
