"""Transport that uses NIXL."""
