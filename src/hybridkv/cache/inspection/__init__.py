"""Read-only views of a cache: why a lookup ended where it did, the arena as a map, the prefixes as a tree."""
