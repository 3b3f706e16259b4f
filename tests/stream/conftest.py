"""No test of a stream ends before all its steps are compared with the stock model."""

from tests.engine.drive import every_step_is_compared  # noqa: F401
