"""A router in front of prefill and decode workers: each request goes to one of both."""

from hybridkv.route.app import RouteOptions, make_router

__all__ = ["RouteOptions", "make_router"]
