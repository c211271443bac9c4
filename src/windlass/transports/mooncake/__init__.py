"""Transport that uses Mooncake's TransferEngine."""
