"""Windlass inside other frameworks, each on its own hook."""
