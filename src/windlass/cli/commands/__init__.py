"""One command per file; the file has the command's name."""
