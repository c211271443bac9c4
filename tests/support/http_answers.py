"""An HTTP server with answers from the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["answering", "answering_requests"]

POLL_S = 0.01
"""Seconds until the server notices that it must end."""


def answering(
    answer: Callable[[str, bytes], tuple[int, bytes]],
    *,
    port: int = 0,
) -> AbstractContextManager[str]:
    """Like `answering_requests`, for an `answer(path, body)` that needs no headers."""
    return answering_requests(lambda path, _headers, body: answer(path, body), port=port)


@contextmanager
def answering_requests(
    answer: Callable[[str, Mapping[str, str], bytes], tuple[int, bytes]],
    *,
    port: int = 0,
) -> Iterator[str]:
    """Yield the URL of a server on this host that runs until the block ends.

    `answer(path, headers, body)` returns status and body for every GET and POST. Each call has its own thread; a
    call that blocks must end before the block does.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self.path, dict(self.headers.items()), asked)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the base class's name

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="http-answers")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
