"""Features beside the core, which reach it through its public seams alone."""
