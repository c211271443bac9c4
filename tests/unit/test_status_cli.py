"""`windlass status` prints what a controller says, to the letter."""

from __future__ import annotations

import json

import pytest

from windlass.cli.main import main
from windlass.testing.http_answers import answering

OVERVIEW = {
    "published_version": 3,
    "epoch": 1,
    "mode": "in_place",
    "phase": "",
    "engines": [
        {
            "name": "a",
            "version": 3,
            "ranks": 1,
            "world_size": 1,
            "routable": True,
            "tainted": False,
            "refused": "",
            "url": "http://[fd77::1]:8000",
        }
    ],
    "rounds": [],
    "rollouts": dict.fromkeys(
        ("outstanding", "running", "waiting", "completed", "failed", "lost", "workers"), 0
    ),
    "staleness": {},
}


def test_the_brackets_of_an_ipv6_address_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", "secret of the test")
    monkeypatch.setenv("COLUMNS", "200")
    with answering(lambda _path, _asked: (200, json.dumps(OVERVIEW).encode())) as url:
        assert main(["status", url]) == 0
    assert "http://[fd77::1]:8000" in capsys.readouterr().out
