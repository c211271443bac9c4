"""Entry point of a worker process that knows no workflows: `windlass.rollout.runner`."""

from __future__ import annotations

import sys

from windlass.rollout.runner import run_rollout_worker

if __name__ == "__main__":
    sys.exit(run_rollout_worker({}))
