"""NIXL as a transport."""
