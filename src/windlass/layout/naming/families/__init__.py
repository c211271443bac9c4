"""One family of models per file: the name of the file is the `model_type` of its checkpoints."""
