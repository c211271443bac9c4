"""The option `--rdma-device`, and the two devices of a test."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from multiprocessing.context import ForkServerContext

import pytest
from forks import ForkedChild, start_fork_server
from nics import TOLD, Nic, find_nics, tell

from windlass.testing import peer_process
from windlass.testing.peer_process import Child
from windlass.transports.registry import TransportConfig

ANSWER_S = 120.0
"""Seconds that an emulated processor with a busy queue needs to start a peer."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rdma-device",
        action="append",
        default=[],
        metavar="NAME[@ADDRESS]",
        help="RDMA device to test on; twice for the two ends, four more for two ends of two NICs "
        "each, in turn; default: those that are there",
    )


@pytest.fixture(scope="session")
def nics(request: pytest.FixtureRequest) -> Iterator[tuple[Nic, Nic]]:
    """Yield the device of this side and the device of the peer."""
    asked: list[str] = request.config.getoption("--rdma-device", default=[])
    here, there = find_nics(asked)
    yield here, there
    for nic in {here, there}:
        tell(f"{nic.name} (driver {nic.driver}) counted: {nic.counters()}")


@pytest.fixture(scope="session")
def forks(request: pytest.FixtureRequest) -> ForkServerContext:
    """Provide a fork server with all imports done.

    It imports torch only if a whole update is tested.
    """
    start = time.monotonic()
    updates = any(item.path.name == "test_verbs_update.py" for item in request.session.items)
    context = start_fork_server("verbs_job" if updates else "verbs_launch")
    tell(f"fork server ready after {time.monotonic() - start:.0f} s")
    return context


@pytest.fixture(scope="session", autouse=True)
def forked_peers(forks: ForkServerContext) -> Iterator[None]:
    """Fork the peers, and wait for them as long as an emulated processor needs."""

    def start(config: TransportConfig, nbytes: int, environment: Mapping[str, str]) -> Child:
        return ForkedChild(forks, config, nbytes, environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_process, "ANSWER_S", ANSWER_S)
        patch.setattr(peer_process, "start_child", start)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOLD:
        terminalreporter.section("what the bytes went through")
        for line in TOLD:
            terminalreporter.write_line(line)
