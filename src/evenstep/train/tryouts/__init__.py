"""Trials before or between updates, after which the state of the run is restored."""
