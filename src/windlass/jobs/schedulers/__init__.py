"""Schedulers that start and watch processes: on this host, with Slurm, with Ray, or from another package."""
