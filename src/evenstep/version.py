"""The version of evenstep, in one place; not computed, so that it holds in an installed wheel as well."""

__version__ = "0.1.0"
