"""NVLink on one host: peer memory opened through CUDA IPC, kernels that store straight into it."""
