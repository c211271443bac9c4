"""What a rank of SGLang says of an order is heard, though its server ends before it has answered."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from windlass.engines.sglang import orders
from windlass.engines.sglang.answers import report, report_failure
from windlass.engines.sglang.orders import Digests, ask_ranks, order_ranks
from windlass.errors import PeerUnreachable

DEADLINE_S = 20.0


@contextmanager
def ending_with(on_order: Callable[[], None]) -> Iterator[str]:
    """Yields the address of a server that closes the connection on an order, and says nothing more."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/update_weights_from_tensor":
                on_order()
                return
            body = b'{"success": true}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)


def ask(of_a_rank: Callable[[str], None]) -> None:
    folders: list[str] = []

    def order(folder: str) -> Digests:
        folders.append(folder)
        return Digests(folder)

    with ending_with(lambda: of_a_rank(folders[0])) as url:
        ask_ranks(url, order, 2, DEADLINE_S)


def test_the_reason_of_a_rank_of_the_first_stage_outlives_its_server() -> None:
    with pytest.raises(PeerUnreachable, match="rank 0: its weights are packed"):
        ask(lambda folder: report_failure(folder, 0, "its weights are packed"))


def test_a_server_that_ends_without_a_reason_is_named() -> None:
    with pytest.raises(PeerUnreachable, match=r"POST http://.*/update_weights_from_tensor"):
        ask(lambda folder: report(folder, 1, b""))


def test_a_session_that_may_open_yet_is_closed_by_a_process_that_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang opens it once no request runs any more, whether or not anybody waits."""
    asked: list[str] = []

    def post(_url: str, path: str, *_: object) -> bytes:
        asked.append(path)
        if path == "/begin_weight_update":
            raise SystemExit(128 + signal.SIGTERM)
        return b'{"success": true}'

    monkeypatch.setattr(orders, "post", post)
    with pytest.raises(SystemExit):
        order_ranks("http://nowhere", Digests(""), 1, DEADLINE_S)
    assert asked == ["/begin_weight_update", "/end_weight_update"]
