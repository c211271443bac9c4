"""Adapter for vLLM: a worker extension, a scheduler class, a weight-transfer backend, and middleware."""
