"""Loads a checkpoint as a model that the engine can run."""
