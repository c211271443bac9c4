"""The RDMA devices of an engine are found while another engine of the process closes its devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.transports.mooncake import native as mooncake_native


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a file in place of /dev/infiniband/uverbs0."""
    found = tmp_path / "uverbs0"
    found.touch()
    monkeypatch.setattr(mooncake_native, "VERBS", str(tmp_path / "uverbs"))
    monkeypatch.setattr(mooncake_native, "device_name", lambda verbs: f"nic of {Path(verbs).name}")
    return found


def test_a_device_opened_before_the_mark_is_not_new(device: Path) -> None:
    before = os.open(device, os.O_RDWR)
    assert mooncake_native.open_devices(mark=True) == {"nic of uverbs0"}
    assert mooncake_native.open_devices(mark=False) == set()
    os.close(before)


def test_a_device_that_reuses_a_closed_descriptor_number_is_new(
    device: Path,
) -> None:
    before = os.open(device, os.O_RDWR)
    mooncake_native.open_devices(mark=True)
    os.close(before)
    after = os.open(device, os.O_RDWR)
    assert after == before
    assert mooncake_native.open_devices(mark=False) == {"nic of uverbs0"}
    os.close(after)
