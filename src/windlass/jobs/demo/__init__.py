"""Job of `windlass demo`: a real training run, its recipe, and its checker."""
