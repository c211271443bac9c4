"""`windlass status` prints what a controller says, to the letter."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from windlass.cli.main import main

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


class _Overview(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(OVERVIEW).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing is logged."""


def test_the_brackets_of_an_ipv6_address_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", "secret of the test")
    monkeypatch.setenv("COLUMNS", "200")
    with HTTPServer(("127.0.0.1", 0), _Overview) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(["status", f"http://127.0.0.1:{server.server_port}"]) == 0
        finally:
            server.shutdown()
            thread.join()
    assert "http://[fd77::1]:8000" in capsys.readouterr().out
