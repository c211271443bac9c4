"""The launcher receives a rank's report on an order even if the SGLang server ends before it answers."""

from __future__ import annotations

import base64
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.reduction import ForkingPickler

import pytest

from windlass.engines.http import EngineHttp
from windlass.engines.rank_reports import Secrets, carry_out, join_fleet
from windlass.engines.sglang.orders import Digests, order_ranks
from windlass.engines.sglang.spec import send_step
from windlass.engines.spec import AgentSettings
from windlass.errors import PeerUnreachable

DEADLINE_S = 20.0


@contextmanager
def ending_with(on_order: Callable[[str], None]) -> Iterator[str]:
    """Yield the address of a server that closes the connection on an order, without an answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/update_weights_from_tensor":
                [encoded, _] = json.loads(asked)["serialized_named_tensors"]
                [(order, _)] = ForkingPickler.loads(base64.b64decode(encoded))
                on_order(json.loads(order)["folder"])
                return
            body = b'{"success": true}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            # Some releases have no route for their settings.
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Print nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)


def ask(of_a_rank: Callable[[str], None]) -> None:
    """Order two ranks to capture their layouts; a rank calls `of_a_rank` with the folder of reports."""
    with ending_with(of_a_rank) as url:
        settings = AgentSettings(
            name="a", controller="http://c", transport="cma", url=url, checkpoint="/m", world_size=2
        )
        join_fleet(send_step, settings, Secrets())


def test_a_refusal_by_a_rank_is_reported_after_its_server_ended() -> None:
    def refuse(_: Secrets) -> bytes:
        raise PeerUnreachable("its weights are packed")

    with pytest.raises(PeerUnreachable, match="rank 0: its weights are packed"):
        ask(lambda folder: carry_out(folder, 0, refuse))


def test_a_server_that_ends_without_a_reason_is_named() -> None:
    with pytest.raises(PeerUnreachable, match=r"POST http://.*/update_weights_from_tensor"):
        ask(lambda folder: carry_out(folder, 1, lambda _: b""))


def test_a_process_that_is_ended_closes_a_session_that_may_still_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang opens the session when no request runs, even if the process no longer waits for the answer."""
    asked: list[str] = []

    def post(_: EngineHttp, path: str, *_body: object) -> bytes:
        asked.append(path)
        if path == "/begin_weight_update":
            raise SystemExit(128 + signal.SIGTERM)
        return b'{"success": true}'

    monkeypatch.setattr(EngineHttp, "post", post)
    with pytest.raises(SystemExit):
        order_ranks(EngineHttp("http://nowhere"), Digests(""), 1, DEADLINE_S)
    assert asked == ["/begin_weight_update", "/end_weight_update"]
