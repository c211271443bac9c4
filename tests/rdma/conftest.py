"""`--rdma-device`, and the two devices of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nics import TOLD, Nic, find_nics

from windlass.testing import peer_process

ANSWER_S = 120.0
"""An emulated processor takes this long to start a peer beside a busy queue."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rdma-device",
        action="append",
        default=[],
        metavar="NAME[@ADDRESS]",
        help="RDMA device to test on; twice for the two ends; default: those that are there",
    )


@pytest.fixture(scope="session")
def nics(request: pytest.FixtureRequest) -> tuple[Nic, Nic]:
    """This side's device and the peer's."""
    asked: list[str] = request.config.getoption("--rdma-device", default=[])
    return find_nics(asked)


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # before the peers of a whole class
        patch.setattr(peer_process, "ANSWER_S", ANSWER_S)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOLD:
        terminalreporter.section("what the bytes went through")
        for line in TOLD:
            terminalreporter.write_line(line)
