"""Where an engine puts a checkpoint: learnt by watching its own loader, not from a table."""
