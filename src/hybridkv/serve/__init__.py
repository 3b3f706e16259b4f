"""An OpenAI-compatible server on one engine."""

from hybridkv.serve.access import check_sites
from hybridkv.serve.app import ServeOptions, make_app
from hybridkv.serve.clients import Clients
from hybridkv.serve.connection_limits import ConnectionLimits
from hybridkv.serve.hidden_folder import HiddenFolder
from hybridkv.serve.logs import LOG_FORMATS, LOG_LEVELS, set_up_logs
from hybridkv.serve.server import Server

__all__ = [
    "LOG_FORMATS",
    "LOG_LEVELS",
    "Clients",
    "ConnectionLimits",
    "HiddenFolder",
    "ServeOptions",
    "Server",
    "check_sites",
    "make_app",
    "set_up_logs",
]
