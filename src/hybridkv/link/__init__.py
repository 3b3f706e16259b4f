"""Links between engines: which bytes of one arena belong where in another. Pure Python and numpy, no torch."""
