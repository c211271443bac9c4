"""A plain SGLang server without Windlass, which a trainer updates through the server's own weight table.

    python benchmarks/gpu/prove_outside.py --json FILE [--model qwen3-0.6b] [--updates 4] [--logs FOLDER]
        [--on-cpu --python /path/to/python --engine-path tests/support/cpu_allocator]

`windlass capture` writes the layout. Then the live server starts with other weights, without Windlass on its path, and
`windlass attach` joins it to a controller. A trainer publishes versions over Mooncake (TCP), into memory of the first GPU
from the last GPU. At the end a fresh server loads the trainer's saved weights. SGLang's own checksums of all parameters and
greedy tokens must be equal. The JSON file has the seconds of every update. The server and the agent's copies of its weights
share the first GPU. Needs SGLang and Mooncake (on GPUs: its build with CUDA) in the Python that runs this script, or in
`--python`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import transformers
from live_engine.proof_servers import PROMPTS, engine_environment
from live_engine.servers import ON_CPU_ENVIRONMENT, ServerSettings, Sglang, common_flags
from live_engine.shapes import model_config
from live_engine.surroundings import ENVIRONMENT, ROOT, TOKEN

import windlass
from harness import median_p95, parser
from windlass.config import ControlConfig, PhaseDeadlines
from windlass.engines.sglang.table import ENABLING
from windlass.net.addresses import free_port

NAME = "outside"
NUM_TOKENS = 16
START_S = 500.0
HTTP_S = 120.0


def main() -> int:
    """Update a server, compare it with a fresh one, and write the results."""
    options = _options()
    logs = options.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_prove(options, Path(folder), logs))
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps([found], indent=1))
    return 0 if found["outcome"] == "proven" else 1


def _options() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--model", default="qwen3-0.6b", help="sizes of the model")
    made.add_argument("--updates", type=int, default=4, help="number of versions")
    made.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for logs")
    made.add_argument("--on-cpu", action="store_true", help="engine built for CPUs")
    made.add_argument(
        "--python", default=sys.executable, help="interpreter of SGLang's environment"
    )
    made.add_argument("--engine-path", default="", help="folder for the plain server's PYTHONPATH")
    return made.parse_args()


async def _prove(options: argparse.Namespace, folder: Path, logs: Path) -> dict[str, Any]:
    device = "cpu" if options.on_cpu else f"cuda:{torch.cuda.device_count() - 1}"
    config = transformers.AutoConfig.for_model(**model_config(options.model))
    torch.manual_seed(1)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "old")
    _capture(options, folder / "old", folder / "layout.json", logs)
    control = ControlConfig(deadlines=PhaseDeadlines(pause_s=60.0))
    with _server(options, folder / "old", logs / "live.log", table=True) as url:
        async with windlass.Controller(token=TOKEN, config=control) as controller:
            with _attached(options, url, controller.url, folder / "layout.json", logs) as agent:
                # The controller runs in this event loop, and must answer the agent meanwhile.
                await asyncio.to_thread(_wait_joined, agent, logs)
                updates = await asyncio.to_thread(_publish, model, controller.url, options.updates)
                model.save_pretrained(folder / "new")
                live = _held(url)
    with _server(options, folder / "new", logs / "fresh.log", table=False) as url:
        fresh = _held(url)
    different = [name for name, value in fresh[0].items() if live[0].get(name) != value]
    equal = live == fresh and not different and len(set(map(tuple, live[1]))) > 1
    found = {
        "outcome": "proven" if equal else "failed",
        "different": different[:10],
        "tokens_equal": live[1] == fresh[1],
        "num_parameters": len(fresh[0]),
        "nbytes": sum(p.nbytes for p in model.parameters()),
        "tokens": live[1],
        "updates": updates,
    }
    for name in ("wire_s", "update_s", "pause_s"):
        found[name] = median_p95([each[name] for each in updates[1:] or updates])[0]
    return found


@torch.no_grad()
def _publish(model: Any, controller: str, num_updates: int) -> list[dict[str, float]]:
    """Publish versions with other values of every element, and return the seconds of each."""
    updates = []
    transport = '{"type": "mooncake", "host": "127.0.0.1", "protocol": "tcp"}'
    with windlass.connect_trainer(
        model, controller=controller, token=TOKEN, transport=transport
    ) as trainer:
        for version in range(1, num_updates + 1):
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.05)
            report = trainer.publish(version).result()
            assert report.digest_ok, report
            updates.append(
                {name: float(getattr(report, name)) for name in ("wire_s", "update_s", "pause_s")}
            )
    return updates


def _flags(options: argparse.Namespace) -> list[str]:
    """Return SGLang's flags that the captured, the live and the fresh server share."""
    settings = ServerSettings(
        engine="sglang", port=0, tp=1, transport="", with_weights=True, streams=16,
        engine_memory=0.3, on_cpu=options.on_cpu, python=options.python,
    )  # fmt: skip
    words = Sglang(settings, None).command("", "")  # type: ignore[arg-type]
    return words[1 + len(common_flags(settings, "", "")) :]


def _environment(options: argparse.Namespace, path: Sequence[str]) -> dict[str, str]:
    given = [each for each in os.environ.get("PYTHONPATH", "").split(":") if each]
    foreign = [each for each in given if not (Path(each) / "windlass").is_dir()]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS_")}
    own = ON_CPU_ENVIRONMENT if options.on_cpu else {"CUDA_VISIBLE_DEVICES": "0"}
    engine = Sglang.environment if options.on_cpu else engine_environment("sglang")
    table = {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}
    path_ = {"PYTHONPATH": ":".join([*path, *foreign])}
    found = {**kept, **ENVIRONMENT, **engine, **own, **table, **path_}
    if options.on_cpu:
        found.pop("SGLANG_CPU_OMP_THREADS_BIND", None)
    return found


def _capture(options: argparse.Namespace, model: Path, output: Path, logs: Path) -> None:
    words = ("capture", "--engine", "sglang", "--model", str(model), "--output", str(output))
    command = [options.python, "-m", "windlass.cli.main", *words, "--", *_flags(options)]
    with (logs / "capture.log").open("w") as log:
        subprocess.run(
            command, check=True, stdout=log, stderr=log, env=_environment(options, [f"{ROOT}/src"])
        )


@contextmanager
def _server(options: argparse.Namespace, model: Path, log: Path, *, table: bool) -> Iterator[str]:
    """Run SGLang without Windlass on its path, and yield its URL when it serves."""
    port = free_port()
    command = [
        *(options.python, "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), *_flags(options)),
        *((ENABLING, "--engine-info-bootstrap-port", str(free_port())) if table else ()),
    ]
    path = [options.engine_path] if options.engine_path else []
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            env=_environment(options, path), start_new_session=True,
        )  # fmt: skip
    url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=HTTP_S).close()
                break
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the server does not serve: {log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


@contextmanager
def _attached(
    options: argparse.Namespace, url: str, controller: str, layout: Path, logs: Path
) -> Iterator[subprocess.Popen[str]]:
    transport = {"type": "mooncake", "host": "127.0.0.1", "protocol": "tcp"}
    if not options.on_cpu:
        transport["gpu"] = 0  # type: ignore[assignment]
    command = [
        *(sys.executable, "-m", "windlass.cli.main", "attach", "--layout", str(layout)),
        *("--url", url, "--name", NAME, "--controller", controller),
        *("--transport", json.dumps(transport)),
    ]
    environment = {**os.environ, "WINDLASS_TOKEN": TOKEN, "PYTHONPATH": _own_path()}
    with (logs / "agent.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def _wait_joined(agent: subprocess.Popen[str], logs: Path) -> None:
    assert agent.stdout is not None
    if not agent.stdout.readline():
        raise RuntimeError((logs / "agent.log").read_text()[-3000:])


def _own_path() -> str:
    return f"{ROOT}/src:{os.environ.get('PYTHONPATH', '')}"


def _held(url: str) -> tuple[dict[str, str], list[list[int]]]:
    """Return SGLang's checksums of a server's parameters, and its greedy tokens."""
    checked = _post(url, "/weights_checker", {"action": "checksum"})
    sums = {
        f"{rank}: {name}": value
        for rank, each in enumerate(checked["ranks"])
        for name, value in each["checksums"].items()
    }
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = [
        _post(url, "/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        for prompt in PROMPTS
    ]
    return sums, [list(answer["output_ids"]) for answer in answers]


def _post(url: str, path: str, body: object) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=HTTP_S) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{path}: {error.code} {error.read()[:500]!r}") from error


if __name__ == "__main__":
    sys.exit(main())
