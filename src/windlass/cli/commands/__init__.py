"""Commands of the CLI; each file contains one command and has its name."""
