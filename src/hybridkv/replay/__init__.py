"""Replay a trace of requests through the cache core, without a model and without a GPU."""
