"""Mooncake store: objects in the memory of a Mooncake cluster."""
