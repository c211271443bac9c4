"""`--rdma-device`, and the two devices of a test."""

from __future__ import annotations

import pytest
from nics import Nic, find_nics


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
