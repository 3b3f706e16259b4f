"""From a checkpoint to a model that can run."""
