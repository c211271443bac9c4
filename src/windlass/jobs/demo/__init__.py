"""`windlass demo`: a launched job that trains for real, its recipe, its checker and its picture."""
