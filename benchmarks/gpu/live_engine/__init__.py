"""Live vLLM and SGLang servers on GPUs, and the trainers that update them."""
