"""An OpenAI-compatible server on one engine."""

from hybridkv.serve.app import ServeOptions, make_app
from hybridkv.serve.hidden_folder import HiddenFolder
from hybridkv.serve.logs import LOG_FORMATS, LOG_LEVELS, set_up_logs
from hybridkv.serve.server import Server

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "HiddenFolder", "ServeOptions", "Server", "make_app", "set_up_logs"]
