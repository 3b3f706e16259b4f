"""Kernels of steps in which every request has one token, in Triton: nothing of them depends on the host."""
