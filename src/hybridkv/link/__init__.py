"""Prefill here, decode there: moves the cache of a prompt from one engine's arena into another's, over NIXL."""
