"""SGLang, unmodified: a custom weight loader, and its own HTTP routes."""
