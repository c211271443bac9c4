"""Integrations of Windlass into other frameworks, each through a hook of the framework."""
