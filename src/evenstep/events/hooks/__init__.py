"""Hooks that come with evenstep."""
