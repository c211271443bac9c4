"""One command per file: the name of the file is that of the command."""
