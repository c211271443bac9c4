"""Fixtures of the tests of agents."""

from chat_fleet import embedded, folder

__all__ = ["embedded", "folder"]
