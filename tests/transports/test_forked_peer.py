"""The forked peers of the verbs tests also work over `cma`, on any machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from windlass.testing import peer_process
from windlass.testing.peer_process import PeerProcess, digest_of
from windlass.transports.cma import CmaConfig


def test_a_forked_peer_answers_as_a_started_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "rdma"))
    forks = importlib.import_module("forks")
    context = forks.start_fork_server("forks")
    monkeypatch.setattr(
        peer_process, "start_child", lambda *asked: forks.ForkedChild(context, *asked)
    )
    with PeerProcess(CmaConfig(), 4096) as peer:
        peer.fill(7)
        assert peer.digest() == digest_of(bytes([7]) * 4096)
        assert peer.region.endpoint.transport == "cma"
