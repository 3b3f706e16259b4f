"""Real servers for tests and benchmarks, each with a free port of 127.0.0.1 and a directory of its own."""
