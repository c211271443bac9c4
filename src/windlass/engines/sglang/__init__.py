"""Adapter for SGLang: a plugin for its server, and a custom weight loader that runs in its ranks."""
