"""`windlass serve` as a process updates a fleet, and a later one continues from its journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from weight_fleet import TOKEN, Fleet

from windlass import envs
from windlass.cli.commands.serve import parse_backend
from windlass.cli.controller import fetch_overview
from windlass.cli.main import main
from windlass.config import DiskBackend, P2pBackend, RelayShape, XcclBackend
from windlass.errors import ConfigError


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Yield the address of a server. SIGTERM must end it without an error."""
    process = subprocess.Popen(
        (sys.executable, "-m", "windlass.cli.main", "serve", *arguments),
        env={**os.environ, "WINDLASS_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), f"ended with {process.wait(30)}"
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


async def test_a_served_fleet_is_updated_and_the_next_server_knows_its_version(
    tmp_path: Path,
) -> None:
    journal = ("--journal", str(tmp_path / "journal"))
    with served("--mode", "staged", "--pause-mode", "retract", *journal) as url:
        fleet = Fleet(url, 1)
        try:
            fleet.add_trainers()
            fleet.add_engine("engine-a")
            await fleet.ready()
            for version in range(2):
                assert (await fleet.publish(version)).outcome == "published"
                assert await fleet.held("engine-a") == [(version, str(version), False)]
            view = await fetch_overview(url, TOKEN, 10.0)
            assert (view["published_version"], view["mode"]) == (1, "staged")
            assert [engine["name"] for engine in view["engines"]] == ["engine-a"]
        finally:
            fleet.close()
    with served(*journal) as url:
        assert (await fetch_overview(url, TOKEN, 10.0))["published_version"] == 1


def test_serve_accepts_a_backend_by_name_or_in_full() -> None:
    assert parse_backend("p2p") == P2pBackend()
    assert parse_backend("xccl") == XcclBackend()
    assert parse_backend('{"type": "disk", "folder": "/w"}') == DiskBackend("/w")
    assert parse_backend('{"type": "p2p", "relay": "tree"}') == P2pBackend(relay=RelayShape.TREE)
    for wrong in ("disk", "{}", '{"type": "disk"}', '{"type": "disk", "folder": "w"}'):
        with pytest.raises(ConfigError, match=r"--backend|folder must be an absolute path"):
            parse_backend(wrong)


def test_serve_without_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WINDLASS_TOKEN", raising=False)
    monkeypatch.setattr(envs, "removed_secrets", {})
    assert main(["serve"]) == 2
    assert "WINDLASS_TOKEN must be set" in capsys.readouterr().err
