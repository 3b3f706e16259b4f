"""The errors hybridkv raises on purpose.

Each message names the thing, the value and the way out, in one line: the CLI prints it as it is and exits with 2.
"""


class HybridKVError(ValueError):
    """Base of every error that bad input can cause."""


class ConfigError(HybridKVError):
    """A model's configuration is missing, unreadable, or says something we refuse to guess about."""


class MissingFieldError(ConfigError):
    """A model's configuration does not say something that has no default."""


class ParallelismError(ConfigError):
    """The model cannot be split over the asked number of tensor-parallel ranks."""


class PlanError(HybridKVError):
    """The options contradict each other, or the memory is too small for the model."""


class RequestError(HybridKVError):
    """A request asks for something that does not exist, or for more than anyone may ask. `param`: by which field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
