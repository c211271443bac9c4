"""CUDA on one host: peer memory opened through CUDA IPC, and kernels that store into it."""
