"""A whole job from one file: `windlass launch CONFIG.toml`."""

from __future__ import annotations

from windlass.launch.config import LaunchConfig, load_config
from windlass.launch.job import JobSummary, run_job
from windlass.launch.recipe import Recipe, Task

__all__ = ["JobSummary", "LaunchConfig", "Recipe", "Task", "load_config", "run_job"]
