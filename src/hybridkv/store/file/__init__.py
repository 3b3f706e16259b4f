"""A directory that several processes share as one store."""
