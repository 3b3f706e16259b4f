"""From a model's name, directory or config.json to the layer specs of one tensor-parallel rank. No torch."""

from hybridkv.models.catalogue import CatalogueEntry, catalogue
from hybridkv.models.reader import load_model, read_config

__all__ = ["CatalogueEntry", "catalogue", "load_model", "read_config"]
