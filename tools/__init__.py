"""Scripts of the source tree; no part of the installed package."""
