"""An engine of your own: any model behind `/generate`. Windlass writes directly into its parameters.

export WINDLASS_TOKEN=...
python examples/own_engine.py --name engine-a --model CONFIG.json --controller URL

An engine needs two parts. `Served` has four methods that the agent calls between two steps. `join`
moves the parameters into registered memory and connects to the controller with their addresses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers

import windlass
from windlass.engines import describe_module, parameter_addresses
from windlass.layout import Role
from windlass.transfer import Arena
from windlass.transports import create_transport, parse_transport


class Served:
    """Model that generates step by step, with the `windlass.EngineHooks` of its only rank."""

    def __init__(self, model: Any) -> None:
        self.model, self.version = model, -1
        self._changed = threading.Condition()
        self._num_steps, self._paused, self._num_aborts = 0, True, 0

    def pause(self, pause_id: str, mode: windlass.PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        """Prevent new steps and return when no step runs. `in_place` requests wait; others are aborted."""
        with self._changed:
            self._paused = True
            if mode is not windlass.PauseMode.IN_PLACE:
                self._num_aborts += 1
            if not self._changed.wait_for(lambda: self._num_steps == 0, deadline_s):
                raise windlass.PeerTimeout(f"pause: a step runs on after {deadline_s} s")

    def resume(self, deadline_s: float) -> None:  # noqa: ARG002
        """Allow steps again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def finalise(self) -> None:
        """Do nothing: this engine has no values derived from weights, such as a prefix cache."""

    def set_version(self, version: int, deadline_s: float) -> None:  # noqa: ARG002
        """Set the version of the next tokens."""
        self.version = version

    @contextmanager
    def step(self) -> Iterator[int]:
        """Yield the version; no update can begin inside the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._num_steps += 1
        try:
            yield self.version
        finally:
            with self._changed:
                self._num_steps -= 1
                self._changed.notify_all()

    def generate(self, input_ids: list[int], max_new_tokens: int, temperature: float) -> Any:
        """Return tokens, their logprobs and their versions, in the format of SGLang."""
        tokens, reason = list(input_ids), "length"
        logprobs: list[tuple[float, int, None]] = []
        versions: list[int] = []
        num_aborts = self._num_aborts
        for _ in range(max_new_tokens):
            with self.step() as version, torch.inference_mode():
                if self._num_aborts != num_aborts and versions:
                    # The caller continues from these tokens.
                    reason = "abort"
                    break
                scores = self.model(torch.tensor([tokens])).logits[0, -1].float()
            chances = (scores / max(temperature, 1e-6)).log_softmax(-1)
            token = int(torch.multinomial(chances.exp(), 1))
            tokens.append(token)
            logprobs.append((float(chances[token]), token, None))
            versions.append(version)
        return {
            "output_ids": tokens[len(input_ids) :],
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": logprobs,
                "output_token_versions": versions,
            },
        }


def join(
    served: Served, *, url: str, controller: str, token: str, name: str
) -> windlass.EngineClient:
    """Join the fleet as an engine, until the client is closed or this process ends."""
    transport = create_transport(parse_transport("cma"), towards=controller)
    parameters = list(served.model.parameters())
    arena = Arena(transport, sum(-(-each.nbytes // 64) * 64 for each in parameters))
    begin = 0
    for each in parameters:
        memory = torch.frombuffer(arena.bytes, dtype=torch.uint8)[begin : begin + each.nbytes]
        each.data = memory.view(each.dtype).view(each.shape).copy_(each.data)
        begin += -(-each.nbytes // 64) * 64
    return windlass.EngineClient(
        windlass.EngineWeights(
            manifest=describe_module(served.model, f"{name}/0", Role.ENGINE),
            addresses=parameter_addresses(served.model),
            regions=[arena.region],
        ),
        transport=transport,
        hooks=served,
        controller=controller,
        token=token,
        url=url,
    )


def handler(served: Served) -> type[BaseHTTPRequestHandler]:
    """Return the handler of `POST /generate`. Each request has its own thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sampling = asked["sampling_params"]
            answer = json.dumps(
                served.generate(
                    asked["input_ids"], sampling["max_new_tokens"], sampling["temperature"]
                )
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    return Handler


def token() -> str:
    """Return the controller's secret."""
    return os.environ.get("WINDLASS_TOKEN") or sys.exit(
        "WINDLASS_TOKEN must be set to the controller's secret, got none; "
        "run `export WINDLASS_TOKEN=a-secret-of-yours` in every terminal"
    )


def main() -> None:
    """Start the server and join the fleet. The engine generates after the first published version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", required=True, type=Path, help="configuration JSON")
    parser.add_argument("--controller", required=True, help="address of the controller")
    args = parser.parse_args()
    if not args.model.is_file():
        parser.error(f"--model must be a JSON file with a model configuration, got {args.model}")
    secret = token()
    config = transformers.AutoConfig.for_model(**json.loads(args.model.read_text()))
    served = Served(transformers.AutoModelForCausalLM.from_config(config).eval())
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(served))
    url = f"http://127.0.0.1:{server.server_port}"
    join(served, url=url, controller=args.controller, token=secret, name=args.name)
    server.serve_forever()


if __name__ == "__main__":
    main()
