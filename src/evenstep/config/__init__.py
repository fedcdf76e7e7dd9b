"""Run files: their keys, their values, and the objects that they name and are built from."""
