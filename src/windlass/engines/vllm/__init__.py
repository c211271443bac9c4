"""vLLM, unmodified: a worker extension, and its own HTTP routes."""
