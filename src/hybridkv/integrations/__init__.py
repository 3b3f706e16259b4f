"""Adapters that put hybridkv inside other engines."""
