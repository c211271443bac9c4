"""Capture of an engine's memory layout: finds where the engine's own loader writes each checkpoint element."""
