"""The configuration of a run: one TOML file, the environment and the command line, checked as a whole.

`load` reads, `schema` says what there is, `check` and `target` find what cannot work together. It builds nothing:
`evenstep.builders` does, and only it and the command line read this package.
"""
