"""`windlass status` prints the exact values of the controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from http_answers import answering

from windlass.cli.main import main
from windlass.net.addresses import free_port

OVERVIEW = {
    "links": [],
    "published_version": 3,
    "epoch": 1,
    "mode": "in_place",
    "phase": "",
    "refused": {},
    "engines": [
        {
            "name": "a",
            "version": 3,
            "ranks": 1,
            "world_size": 1,
            "routable": True,
            "state": "serving",
            "reason": "",
            "url": "http://[fd77::1]:8000",
        }
    ],
    "rounds": [],
    "rollouts": {
        **dict.fromkeys(
            ("outstanding", "running", "waiting", "completed", "failed", "lost", "workers"), 0
        ),
        "too_old": 5,
        "stopped_early": 7,
        "dropped": 4,
        "rejected": 1,
        "wasted_tokens": 96,
    },
    "staleness": {},
}


def test_status_escapes_text_of_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", "secret of the test")
    monkeypatch.setenv("COLUMNS", "200")
    engine = {**OVERVIEW["engines"][0], "reason": "no\x1b[2J\r\nall is well\u202e"}  # type: ignore[index]
    overview = {**OVERVIEW, "engines": [engine], "staleness": {"\x1b]0;1\x07": 1}}
    with answering(lambda _path, _asked: (200, json.dumps(overview).encode())) as url:
        assert main(["status", url]) == 0
    shown = capsys.readouterr().out
    assert r"no\x1b[2J\r\nall is well\u202e" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_status_prints_ipv6_brackets_and_dropped_rollouts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", "secret of the test")
    monkeypatch.setenv("COLUMNS", "200")
    with answering(lambda _path, _asked: (200, json.dumps(OVERVIEW).encode())) as url:
        assert main(["status", url]) == 0
    shown = capsys.readouterr().out
    assert "http://[fd77::1]:8000" in shown
    assert (
        "rollouts thrown away: too old 5, stopped early 7, dropped 4, rejected 1, wasted tokens 96"
        in shown
    )


def test_status_of_an_absent_controller_does_not_mention_tls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", "secret of the test")
    for watch in ([], ["--watch"]):
        port = free_port()
        assert main(["status", f"http://127.0.0.1:{port}", *watch]) == 2
        said = capsys.readouterr().err
        assert f"no connection to 127.0.0.1:{port}: " in said
        assert "ssl" not in said


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"engines": None}, "Expected `array`, got `null` - at `$.engines`"),
        ({"engines": ["a"]}, "Expected `object`, got `str` - at `$.engines[0]`"),
        ({"rounds": 3}, "Expected `array`, got `int` - at `$.rounds`"),
    ],
)
def test_report_names_the_sender_and_the_fault_of_a_bad_overview(
    changed: dict[str, object],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", "secret of the test")
    body = json.dumps({**OVERVIEW, **changed}).encode()
    with answering(lambda _path, _asked: (200, body)) as url:
        page = tmp_path / "page.html"
        assert main(["report", url, "--ceiling-gbps", "1", "--html", str(page)]) == 2
    assert f"ProtocolError: {url}: overview: {says}" in capsys.readouterr().err
    assert not page.exists()
