"""`windlass demo`: a launched job that trains for real, its recipe and its checker."""
