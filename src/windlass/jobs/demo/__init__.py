"""Job of `windlass demo`: a training run with its recipe, and a checker of its answers."""
