"""The state of a whole run, and when it is saved."""
