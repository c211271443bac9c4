"""Shared set-up of all tests.

Ranks of tests are forked from one server process, which imports their modules once. Tests count
their comparisons of live engines and trainers; the sums are the last line of the run.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

# On a busy machine, an example may take any time.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Libraries of the processes that tests start store files in the cache. The user's cache must not contain them.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build/cache")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Background jobs of a shell ignore SIGINT. Processes that tests start and interrupt would
    # ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

multiprocessing.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "transformers.models.qwen3.modeling_qwen3",
        "windlass.controller",
        "windlass.engines.client",
        "windlass.backends.push_halves",
        "windlass.backends.xccl",
        "windlass.backends.disk",
        "windlass.transfer.dtensor",
        "windlass.rollout.worker",
        "kill_at",
        "windlass.trainers.client",
        "windlass.transports.cma",
    ]
)

LONGEST = (
    "jobs/test_launch.py",
    "jobs/test_waits.py",
    "jobs/test_hangs.py",
    "trainers/test_serve_again.py",
    "rollout/test_clean_up.py",
    "jobs/test_job_runs.py",
    "jobs/test_fsdp_engine_mesh.py",
    "engines/test_embedded_engine.py",
    "engines/test_attach_killed.py",
    "engines/test_derived_state.py",
    "transfer/test_gpu_over_network.py",
    "rollout/test_rollout_loop.py",
    "control/test_fleet_growth.py",
    "cli/test_live_view.py",
    "cli/test_doctor.py",
    "observability/test_page.py",
    "jobs/test_schedulers.py",
    "jobs/test_train_controller.py",
    "jobs/test_megatron_engine.py",
    "engines/test_recomputed.py",
    "rollout/test_rollout_messages.py",
    "trainers/test_whole.py",
    "rollout/test_rollout_workflows.py",
    "transfer/test_saved_names.py",
    "transfer/test_dtensor.py",
)
"""Files that start first, so that no worker runs one alone at the end. Files with most tests follow."""

GRACE_S = 60.0
PROPERTY = "compared"
COUNTS = Counter[str]()


@pytest.fixture
def compared(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """Provide a function that counts comparisons, named in the plural; they count if the test passes."""
    properties: list[tuple[str, object]] = request.node.user_properties
    return lambda what, count: properties.append((PROPERTY, {what: count}))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort files for the workers of `make unit`, which take them in this order."""
    if hasattr(config, "workerinput"):
        num_tests = Counter(item.path for item in items)
        turns = {Path(__file__).parent / name: turn for turn, name in enumerate(LONGEST)}
        items.sort(key=lambda i: (turns.get(i.path, len(turns)), -num_tests[i.path], i.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """End the process of a test that still runs a minute after its timeout; print the stacks of all threads.

    pytest-timeout raises an exception in the test. A test that blocks while it handles this exception, for example
    because it joins a thread, would otherwise stop the whole run.
    """
    if not item.config.pluginmanager.hasplugin("timeout"):
        return (yield)
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the counts; this runs in the reporting process, even if another process ran the test."""
    if report.when == "call" and report.passed:
        for kind, value in report.user_properties:
            if kind == PROPERTY and isinstance(value, dict):
                COUNTS.update(value)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the sums after all other output of pytest."""
    if COUNTS and not hasattr(config, "workerinput"):
        said = ", ".join(f"{count} {what}" for what, count in sorted(COUNTS.items()))
        print(f"compared, all equal: {said}")
