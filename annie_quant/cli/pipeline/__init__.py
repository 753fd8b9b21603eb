"""Several stages in one run directory: the demo, and the search for a strategy."""
