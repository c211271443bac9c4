"""Logs, metrics, spans, deadlines, and what this machine can do at best."""
