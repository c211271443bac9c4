"""Commands of the CLI, each in a file of the same name."""
