"""Names and cuts of Megatron-core parameters, as one declarative table per model family."""
