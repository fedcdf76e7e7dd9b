"""The configuration of a run: one TOML file, the environment and the command line.

`schema` says what there is, `load` reads it, `check` finds keys that cannot be beside each other, `named` the objects
that are named. It builds nothing: `evenstep.builders` does, and only it and the command line read this package.
"""
