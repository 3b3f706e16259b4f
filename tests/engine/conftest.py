"""No test of an engine ends before all its steps are compared with the stock model."""

import tests.triton_on_cpu  # noqa: F401
from tests.engine.drive import every_step_is_compared  # noqa: F401
