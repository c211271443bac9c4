"""Logs, metrics, spans, deadlines, and measurements of this machine's limits."""
