"""Where an engine puts a checkpoint: captured by watching its own loader, not from a table."""
