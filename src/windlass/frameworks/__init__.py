"""What trainer and engine adapters share about PyTorch."""
