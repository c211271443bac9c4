"""Registered arenas, packing, casting and digests."""
