"""Windlass inside training frameworks, each by the framework's own hook; a module imports its framework."""
