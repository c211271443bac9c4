"""Plain `vllm serve` servers for CPUs, which find the plugin by its entry point, and trainers that
update them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from fresh_servers import checksums, filled_gaps
from hosts import Host
from rank_processes import RankProcesses, running_ranks
from servers import ROOT, VENVS, environment, family, save
from sync_rank import Order, Sent

from tools.entry_points import write_entry_points
from windlass.engines.http import EngineHttp
from windlass.engines.launch import wait_for_server
from windlass.engines.private_routes import saved_key
from windlass.net.addresses import free_port

MODEL = "model"
START_S = 900.0
HTTP_S = 120.0
NUM_WORDS = 250
FLAGS = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "256", "--served-model-name", MODEL),
)


def checkpoint(seed: int, folder: Path, kind: str = "dense") -> Path:
    """Save a small model, with a tokenizer of numbered words."""
    save(kind, seed, folder)
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0"
    ).save_pretrained(folder)


WITH_WINDLASS = ("--weight-transfer-config", '{"backend": "windlass"}')
API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
# Does the same as `vllm serve`, which looks up its version under another package name than the wheel for CPUs has.
SERVE = (
    "-c",
    """
import sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
""",
)
JOINING = "WINDLASS_CONTROLLER"
# Does the same as `vllm serve --headless`, for the same reason.
HEADLESS = """
import sys
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
args.api_server_count = 0
run_headless(args)
"""


@dataclass(frozen=True)
class PlainServer:
    """A server that uses Windlass only through a flag."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def http(self) -> EngineHttp:
        """Return a client of the server, with the key of its private routes if it has one."""
        return EngineHttp(self.url, saved_key(self.url))

    def answer(
        self, prompt: Sequence[int], count: int, *, replica: int | None = None, model: str = MODEL
    ) -> tuple[list[int], list[float]]:
        """Return greedy tokens and their logprobs, from one replica or from the server's choice."""
        body = {
            "model": model, "prompt": list(prompt), "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "logprobs": 1,
        }  # fmt: skip
        headers = {"Content-Type": b"application/json"}
        if replica is not None:
            headers["X-data-parallel-rank"] = str(replica).encode()
        path = "/v1/completions"
        said = json.loads(self.http.send(path, msgspec.json.encode(body), headers, HTTP_S))
        logprobs = said["choices"][0]["logprobs"]
        tokens = [int(word.strip().removeprefix("w")) for word in logprobs["tokens"]]
        return tokens, list(logprobs["token_logprobs"])

    def checksums(self) -> dict[str, str]:
        """Return vLLM's own checksums of the parameters of all ranks."""
        return checksums("vllm", lambda path, body: json.loads(self.http.post(path, body, HTTP_S)))

    def digests(self) -> dict[str, str]:
        """Return fingerprints of every tensor of the first rank, the slots of adapters included."""
        body = {"method": "windlass_digests"}
        found: dict[str, str] = json.loads(self.http.post("/collective_rpc", body, HTTP_S))[
            "results"
        ][0]
        return found

    def version(self) -> str:
        """Return the version that answers carry."""
        return str(json.loads(self.http.get("/weight_info", HTTP_S))["weight_version"])

    def num_prefix_hits(self) -> float:
        """Return the number of prompt tokens that the prefix cache contained."""
        metrics = self.http.get("/metrics", HTTP_S).decode()
        counts = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (.+)$", metrics, re.MULTILINE)
        return sum(float(count) for count in counts)

    def is_paused(self) -> bool:
        return bool(json.loads(self.http.get("/is_paused", HTTP_S))["is_paused"])

    def family(self) -> list[int]:
        """Return the pids of the server, its core and its workers."""
        return family(self.process.pid)


@contextmanager
def serving_plain(
    model: Path,
    log: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    port: int = 0,
    flags: Sequence[str] = (),
    host: Host | None = None,
    in_core: bool = False,
    program: Sequence[str] = API_SERVER,
    variables: Mapping[str, str] | None = None,
    path: str = "",
) -> Iterator[PlainServer]:
    """Run a server as its user starts it, on this machine or on a host of a `Network`.

    Args:
        in_core: run its one rank in the core's process, as on GPUs.
        program: arguments of Python that start the server.
        variables: additional variables of the server's environment. If WINDLASS_CONTROLLER is one of them, the server
            gets no flag of the plugin.
        path: folder of a further plugin's distribution.
    """
    if not (python := VENVS["vllm"] / "bin/python").exists():
        pytest.skip(f"no {python}: make engines installs vllm")
    port = port or free_port()
    installed = log.with_suffix(".installed")
    # The test may start the server again.
    if not installed.exists():
        write_entry_points(installed)
    address = "127.0.0.1" if host is None else host.address
    command = (
        *(str(python), *program, "--model", str(model)),
        *("--host", address, "--port", str(port), "--tensor-parallel-size", str(tp)),
        *("--pipeline-parallel-size", str(pp), "--data-parallel-size", str(dp)),
        *(() if JOINING in (variables or {}) else WITH_WINDLASS),
        *FLAGS,
        *flags,
    )
    inherited = environment("vllm", tp, f"{ROOT / 'src'}:{installed}:{filled_gaps(log)}:{path}")
    if variables is None:
        variables = {"VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(
        command if host is None else host.command(*command),
        env={
            **{name: given for name, given in inherited.items() if name != "WINDLASS_TOKEN"},
            **({} if host is None else on_host(host)),
            **variables,
            **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_core else {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ready, ended = threading.Event(), threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with log.open("a") as stream:
            for line in process.stdout:
                stream.write(line)
                stream.flush()
                if "Application startup complete" in line:
                    ready.set()
        ended.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(START_S), log.read_text()[-4000:]
        assert not ended.is_set(), log.read_text()[-4000:]
        # The server prints that line before it listens.
        reach = partial(wait_for_server, address, port)
        reach() if host is None else host.call(reach)
        server = PlainServer(process, f"http://{address}:{port}", log)
        if pp > 1:
            # vLLM 0.32 on CPUs allocates what later stages receive in a warm-up, which it skips with
            # --enforce-eager; it then ends at the first request.
            server.http.post("/collective_rpc", {"method": "execute_dummy_batch"}, HTTP_S)
        yield server
    finally:
        process.terminate()
        process.wait(60)
        reader.join(30)
        if process.stdout is not None:
            process.stdout.close()


def on_host(host: Host) -> dict[str, str]:
    """Return variables that make torch and vLLM use a host's own network."""
    return {"GLOO_SOCKET_IFNAME": "rail0", "VLLM_HOST_IP": host.address}


@contextmanager
def serving_over_hosts(model: Path, log: Path, hosts: Sequence[Host]) -> Iterator[PlainServer]:
    """Run one server with a tensor-parallel rank on each host, as vLLM starts it; the first host answers."""
    nodes = (
        *("--nnodes", str(len(hosts)), "--distributed-executor-backend", "mp"),
        *("--master-addr", hosts[0].address, "--master-port", str(free_port())),
    )
    num_ranks = len(hosts)
    with ExitStack() as undo:
        for number, host in enumerate(hosts[1:], 1):
            own = log.with_suffix(f".{number}.log")
            installed = write_entry_points(own.with_suffix(".installed"))
            stream = undo.enter_context(own.open("w"))
            follower = subprocess.Popen(
                host.command(
                    *(str(VENVS["vllm"] / "bin/python"), "-c", HEADLESS, "--model", str(model)),
                    *("--headless", "--node-rank", str(number), *nodes),
                    *("--tensor-parallel-size", str(num_ranks), *WITH_WINDLASS, *FLAGS),
                ),
                env={
                    **environment("vllm", num_ranks, f"{ROOT / 'src'}:{installed}"),
                    **on_host(host),
                },
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            undo.callback(follower.wait, 30)
            undo.callback(os.killpg, follower.pid, signal.SIGKILL)
        yield undo.enter_context(
            serving_plain(
                model, log, tp=num_ranks, flags=(*nodes, "--node-rank", "0"), host=hosts[0]
            )
        )


class Trainers(RankProcesses):
    """Ranks of `sync_rank.py`."""

    def answer(self, rank: int) -> Sent:
        """Return the answer to the oldest order without an answer."""
        return msgspec.json.decode(self.line(rank), type=Sent)

    def answers(self) -> list[Sent]:
        """Return one answer per rank."""
        return [self.answer(rank) for rank in range(len(self.processes))]

    def abandon(self) -> None:
        """Kill all running ranks, because a rank cannot continue without its process group."""
        for process in self.processes:
            process.kill()

    def send(
        self, version: int, checkpoint: Path, *, kill: Sequence[int] = (), kill_in: str = ""
    ) -> list[Sent]:
        """Train a step, save it and send it; see `Order`."""
        order = Order(version=version, checkpoint=str(checkpoint), kill=list(kill), kill_in=kill_in)
        self.begin(order)
        answers = self.answers()
        if (checkpoint / "config.json").exists():
            add_tokenizer(checkpoint)
        return answers


@contextmanager
def syncing(
    folder: Path,
    num_ranks: int,
    *,
    by_factory: bool = False,
    hosts: Sequence[Host] = (),
    **settings: Any,
) -> Iterator[Trainers]:
    """Start trainer ranks that make a `WeightSync`, or report why they cannot.

    Args:
        by_factory: use vLLM's environment and its `WeightTransferTrainerFactory`.
        hosts: hosts of the ranks, if they run on hosts of a `Network`.
        settings: fields of `sync_rank.Settings`.
    """
    folder.mkdir(parents=True)
    python = str(VENVS["vllm"] / "bin/python") if by_factory else sys.executable
    script = str(Path(__file__).with_name("factory_rank.py" if by_factory else "sync_rank.py"))
    logs = tuple(folder / f"{rank}.log" for rank in range(num_ranks))
    store = f"tcp://{hosts[0].address if hosts else '127.0.0.1'}:{free_port()}"
    of_all = str(num_ranks), store, json.dumps(settings)
    commands: list[tuple[str, ...]] = [
        (python, script, str(rank), *of_all) for rank in range(num_ranks)
    ]
    if hosts:
        commands = [
            tuple(
                host.command(
                    "env", *(f"{name}={value}" for name, value in on_host(host).items()), *command
                )
            )
            for host, command in zip(hosts, commands, strict=True)
        ]
    with running_ranks(commands, logs, {}, endings=(0, -signal.SIGKILL)) as processes:
        yield Trainers(processes, logs)
