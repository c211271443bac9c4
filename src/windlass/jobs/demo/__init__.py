"""Asynchronous GRPO on one CPU machine, through the public API only."""
