"""Stores below the memory of a replay: what they hold, how far they supply a prompt, and how long a load takes."""
