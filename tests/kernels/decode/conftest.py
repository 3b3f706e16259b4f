import tests.triton_on_cpu  # noqa: F401
