"""Steps in which every sample computes one token: on a GPU each is one CUDA graph, and the host sends only numbers."""
