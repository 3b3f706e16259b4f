"""From a model's name, directory or config.json to the layer specs of one tensor-parallel rank, and to what the whole
model's tokens cost to compute. No torch."""

from hybridkv.models.catalogue import CatalogueEntry, catalogue
from hybridkv.models.compute import Compute, compute_of, read_compute
from hybridkv.models.reader import load_model, read_config

__all__ = ["CatalogueEntry", "Compute", "catalogue", "compute_of", "load_model", "read_compute", "read_config"]
