"""Integration of unmodified vLLM: a worker extension, a scheduler class, and vLLM's own HTTP routes."""
