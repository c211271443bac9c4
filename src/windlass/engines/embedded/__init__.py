"""The embedded engine: Windlass's own server for a transformers causal LM, with some of SGLang's HTTP routes.

With this engine, tests and demos run on machines without vLLM or SGLang. Each tensor-parallel rank is one process.
Rank 0 schedules, samples and serves HTTP; the other ranks run the forward passes that rank 0 broadcasts.
"""
