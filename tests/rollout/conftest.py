"""Fixtures of the tests of the endpoint for agents."""

from chat_fleet import embedded as engine
from chat_fleet import folder

__all__ = ["engine", "folder"]
