"""Trainer adapters and the client that a trainer rank holds."""
