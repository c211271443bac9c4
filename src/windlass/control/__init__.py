"""The update as a transaction: messages, the pure round machine, its asyncio driver."""
