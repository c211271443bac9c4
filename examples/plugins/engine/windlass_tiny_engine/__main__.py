"""Server of a bigram language model in numpy. Its only parameter has the next-token logits of every token.

`python -m windlass_tiny_engine --name a --model SHAPE.json --controller URL`, with WINDLASS_TOKEN set, joins
a fleet, prints its address in one JSON line, and answers `POST /generate` like every engine of Windlass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

import windlass
from windlass.layout import Box, DType, ManifestBuilder, Role
from windlass.transports import create_transport, parse_transport


class Bigrams:
    """Model with the `windlass.EngineHooks` of its only rank. A whole answer is one step."""

    def __init__(self, num_tokens: int) -> None:
        self.logits = np.zeros((num_tokens, num_tokens), np.float32)
        self.version = -1
        self._running = threading.Lock()
        self._may_run = threading.Event()

    def pause(self, pause_id: str, mode: windlass.PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        """Prevent new answers and return when no answer reads the weights."""
        self._may_run.clear()
        if not self._running.acquire(timeout=deadline_s):
            raise windlass.PeerTimeout(f"pause {pause_id}: an answer runs on after {deadline_s} s")
        self._running.release()

    def resume(self, deadline_s: float) -> None:  # noqa: ARG002
        """Allow answers again."""
        self._may_run.set()

    def finalise(self) -> None:
        """Do nothing: this engine has no values derived from weights."""

    def set_version(self, version: int, deadline_s: float) -> None:  # noqa: ARG002
        """Set the version of the next answers."""
        self.version = version

    def generate(self, input_ids: list[int], max_new_tokens: int) -> dict[str, object]:
        """Generate greedily from the last token and return the answer in the format of SGLang."""
        while True:
            self._may_run.wait()
            with self._running:
                if self._may_run.is_set():
                    return self._generate(input_ids[-1], max_new_tokens)

    def _generate(self, last: int, max_new_tokens: int) -> dict[str, object]:
        tokens: list[int] = []
        logprobs: list[tuple[float, int, None]] = []
        for _ in range(max_new_tokens):
            row = self.logits[last].astype(np.float64)
            last = int(row.argmax())
            tokens.append(last)
            logprobs.append((float(row[last] - np.logaddexp.reduce(row)), last, None))
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": logprobs,
                "output_token_versions": [self.version] * len(tokens),
            },
        }


def join(model: Bigrams, args: argparse.Namespace, url: str) -> windlass.EngineClient:
    """Join the fleet as the engine that these options describe."""
    transport = create_transport(parse_transport(args.transport), towards=args.controller)
    logits = model.logits
    builder = ManifestBuilder(f"{args.name}/0", Role.ENGINE)
    builder.add_parameter("bigrams", nbytes=logits.nbytes, dtype=DType.FLOAT32)
    builder.add_shard("bigrams", logits.shape, Box((0, 0), logits.shape), "bigrams")
    return windlass.EngineClient(
        windlass.EngineWeights(
            manifest=builder.build(),
            addresses=[logits.ctypes.data],
            regions=[transport.register(logits.ctypes.data, logits.nbytes)],
        ),
        transport=transport,
        hooks=model,
        controller=args.controller,
        token=token(),
        url=url,
    )


def token() -> str:
    """Return the controller's secret."""
    return os.environ.get("WINDLASS_TOKEN") or sys.exit(
        "WINDLASS_TOKEN must be set to the controller's secret, got none; "
        "run `export WINDLASS_TOKEN=a-secret-of-yours` in every terminal"
    )


def handler(model: Bigrams) -> type[BaseHTTPRequestHandler]:
    """Return the handler of `POST /generate`. Each request has its own thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = model.generate(asked["input_ids"], asked["sampling_params"]["max_new_tokens"])
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    return Handler


def main() -> None:
    """Start the server and join the fleet. The engine answers after the first published version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", required=True, type=Path, help='JSON: {"num_tokens": 8}')
    parser.add_argument("--tp", type=int, choices=[1], default=1)
    parser.add_argument("--controller", required=True, help="address of the controller")
    parser.add_argument("--transport", default="cma")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    if not args.model.is_file():
        parser.error(f"--model must be a JSON file with a model configuration, got {args.model}")
    model = Bigrams(json.loads(args.model.read_text())["num_tokens"])
    server = ThreadingHTTPServer(("127.0.0.1", args.port), handler(model))
    url = f"http://127.0.0.1:{server.server_port}"
    with join(model, args, url):
        print(json.dumps({"name": args.name, "url": url}), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
