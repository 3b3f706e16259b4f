"""Several stores as one, the fastest first."""
