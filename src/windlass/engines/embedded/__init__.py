"""The embedded engine: a transformers causal LM behind SGLang-shaped routes, on any machine.

It exists so that the whole system runs where no inference engine does. One process per
tensor-parallel rank; rank 0 schedules, samples and serves HTTP, the others follow its steps.
"""
