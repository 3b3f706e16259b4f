"""File store: a directory that several processes share."""
