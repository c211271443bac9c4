"""Plans bound to addresses: the sender in the trainer, the receiver in the engine."""
