"""Mooncake TransferEngine as a transport."""
