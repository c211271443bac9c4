"""A whole job from one file: `windlass launch CONFIG.toml`."""

from __future__ import annotations

from windlass.jobs.config import LaunchConfig, load_config
from windlass.jobs.launch import JobSummary, run_job
from windlass.jobs.recipe import Recipe, Task

__all__ = ["JobSummary", "LaunchConfig", "Recipe", "Task", "load_config", "run_job"]
