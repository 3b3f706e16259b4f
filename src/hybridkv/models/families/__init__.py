"""Every family we can read, each beside its siblings. Importing this package fills the registry.

To add one: write a function from `Config` to `Layers` in the fitting module, register it with the defaults of its
transformers config class, say what its feed-forward layers weigh in feed_forward.py, and give the tests a tiny model to
compare it with.
"""

from hybridkv.models.families import dense, experts, latent, linear, mamba, per_layer, uniform, windows, windows_nope

__all__ = ["dense", "experts", "latent", "linear", "mamba", "per_layer", "uniform", "windows", "windows_nope"]
