"""Proves the promise on a user's own run: the rows, what they compare, and what names the cause where one fails.

A run is given as a `Bench`, which builds it anew for each row, shrunk, in this process or in others. Nothing here knows
of run files; `evenstep prove` makes the bench from one.
"""
