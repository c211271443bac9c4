"""Through slime's interface of weight updaters, live Megatron-core ranks update an SGLang server with the plugin."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError

import msgspec
import pytest
import torch
from fresh_servers import filled_gaps
from servers import HTTP_S, TOKEN, Sample, Server, family, save
from sglang_servers import (
    NUM_TOKENS,
    PROMPT,
    SLIME_SERVER,
    check_answer,
    install,
    kill,
    launched,
    token_file,
    variables,
)
from trainer_rank import Order

from trainers import MEGATRON_TP, Ranks, training
from windlass.errors import ConfigError, PlanError
from windlass.integrations import slime
from windlass.net.addresses import free_port


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_megatron_ranks_update_servers_through_slimes_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, log, port = save("dense", 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    told = {"WINDLASS_CONTROLLER": "wait", "WINDLASS_TOKEN_FILE": str(token_file(tmp_path, TOKEN))}
    environment = variables(install(tmp_path / "site"), **told)
    started = partial(launched, old, log, port, environment, program=SLIME_SERVER)
    with ExitStack() as running:
        with training(MEGATRON_TP, "dense", old, script="slime_rank.py") as ranks:
            with started() as server:
                update(server, ranks, 41, tmp_path, has_new_engines=True)
                update(server, ranks, 42, tmp_path)
                kill(server)
            server = running.enter_context(started())
            update(server, ranks, 43, tmp_path, has_new_engines=True)
        # A trainer with a critic has no memory between updates.
        given = {"offload_train": True, "use_critic": True, "update_weight_start_version": 50}
        monkeypatch.setenv("SLIME_ARGS", json.dumps(given))
        other = save("dense", 1, tmp_path / "other")
        with training(MEGATRON_TP, "dense", other, script="slime_rank.py") as ranks:
            for version in (51, 52):
                update(server, ranks, version, tmp_path)


OPEN = (
    *("/server_info", "/flush_cache", "/pause_generation", "/continue_generation"),
    *("/abort_request", "/release_memory_occupation", "/resume_memory_occupation"),
)
"""Routes that slime calls without the server's key."""
WAKES_WEIGHTS, WAKES_CACHES = {"tags": ["weights"]}, {"tags": ["kv_cache", "cuda_graph"]}
COLOCATE = {"colocate": True, "offload_train": True, "offload_rollout": True}
MUST_WAIT_S = 2.0
WAITING_S = 480.0
"""Seconds within which a request is answered that comes before the trainer has started."""


@dataclass(frozen=True)
class Colocated:
    """A server of a slime job with `--colocate`, and the calls of slime's rollout manager."""

    server: Server
    folder: Path
    asking: ThreadPoolExecutor

    def call(self, path: str, body: object = None) -> None:
        """Send a request as slime does, without the key of the server."""
        request = urllib.request.Request(
            self.server.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=HTTP_S) as response:
            assert response.status == 200

    def nbytes(self) -> int:
        """Return the memory of the server's processes that is in use."""
        pages = (
            Path(f"/proc/{pid}/statm").read_text().split()[1]
            for pid in family(self.server.process.pid)
        )
        return 4096 * sum(map(int, pages))

    def offload(self) -> None:
        """Make the server free its memory."""
        self.call("/flush_cache")
        self.call("/release_memory_occupation", {})

    def ask(self) -> Future[Sample]:
        return self.asking.submit(self.server.sample, PROMPT, NUM_TOKENS)

    def turn(
        self,
        ranks: Ranks,
        version: int,
        *,
        has_new_engines: bool = False,
        is_asleep: bool = True,
    ) -> None:
        """Let slime train a step and update the weights, and check what the server serves.

        Args:
            ranks: the trainer's ranks.
            version: number of the update.
            has_new_engines: whether the server joins with this update.
            is_asleep: whether the server sleeps. If not, it has memory, but its weights may be of two versions, so it
                refuses requests until the update.
        """
        checkpoint, waiting = self.folder / str(version), self.ask() if is_asleep else None
        order = Order(self.server.url, "train", version, str(checkpoint))
        ranks.publish(order)
        if waiting:
            self.call("/resume_memory_occupation", WAKES_WEIGHTS)
            self.must_wait(waiting)
        else:
            self.must_refuse()
        words = "update new" if has_new_engines else "update"
        ranks.publish(msgspec.structs.replace(order, transport=words))
        if waiting:
            self.must_wait(waiting)
            self.call("/resume_memory_occupation", WAKES_CACHES)
        waiting = waiting or self.ask()
        assert waiting.result(WAITING_S).versions == [version] * NUM_TOKENS
        assert self.server.digests() == self.server.digests_of_fresh_load(checkpoint)
        check_answer(self.server, checkpoint, version)

    def must_wait(self, waiting: Future[Sample]) -> None:
        with pytest.raises(TimeoutError):
            waiting.result(MUST_WAIT_S)

    def must_refuse(self) -> None:
        """Check that a server with weights of two versions refuses requests with the reason."""
        with pytest.raises(HTTPError) as refused:
            self.ask().result(WAITING_S)
        assert refused.value.code == HTTPStatus.SERVICE_UNAVAILABLE
        assert "weights" in refused.value.read().decode()


@contextmanager
def colocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Colocated]:
    """Start a server as slime does, and make it sleep before it has joined a fleet."""
    monkeypatch.setenv("SLIME_ARGS", json.dumps(COLOCATE))
    old, log = save("dense", 1, tmp_path / "old"), tmp_path / "server.log"
    told = {
        "WINDLASS_CONTROLLER": "wait",
        "WINDLASS_TOKEN_FILE": str(token_file(tmp_path, TOKEN)),
        "WINDLASS_OPEN_ROUTES": ",".join(OPEN),
    }
    environment = variables(f"{install(tmp_path / 'site')}:{filled_gaps(log)}", **told)
    running = launched(
        *(old, log, free_port(), environment),
        program=SLIME_SERVER,
        flags=("--enable-memory-saver",),
    )
    with running as server, ThreadPoolExecutor(4) as asking:
        found = Colocated(replace(server, post_s=WAITING_S), tmp_path, asking)
        found.offload()
        yield found


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_colocated_servers_and_trainers_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sleeps before it joins. Later a trainer rank dies in a turn, and slime starts again."""
    started = partial(training, MEGATRON_TP, "dense", script="slime_rank.py", ends_well=False)
    with colocated(tmp_path, monkeypatch) as turns:
        with started(tmp_path / "old") as ranks:
            turns.turn(ranks, 41, has_new_engines=True)
            awake = turns.nbytes()
            turns.offload()
            assert awake - turns.nbytes() > 1 << 20, "the memory is freed"
            turns.turn(ranks, 42)
            turns.offload()
            order = Order(turns.server.url, "train", 43, str(tmp_path / "43"))
            ranks.publish(order)
            turns.call("/resume_memory_occupation", WAKES_WEIGHTS)
            ranks.begin(msgspec.structs.replace(order, transport="update dies"))
            endings = [process.wait(HTTP_S) for process in ranks.processes]
            assert endings[1] == -signal.SIGKILL
            assert endings[0] != 0
            assert "RoundAborted" in ranks.logs[0].read_text()
        turns.call("/resume_memory_occupation", WAKES_CACHES)
        turns.must_refuse()
        given = {**COLOCATE, "update_weight_start_version": 50}
        monkeypatch.setenv("SLIME_ARGS", json.dumps(given))
        with started(save("dense", 1, tmp_path / "new")) as ranks:
            turns.turn(ranks, 51, has_new_engines=True, is_asleep=False)


def update(
    server: Server, ranks: Ranks, version: int, folder: Path, *, has_new_engines: bool = False
) -> None:
    checkpoint = folder / str(version)
    order = Order(server.url, "new" if has_new_engines else "", version, str(checkpoint))
    ranks.publish(order)
    assert server.digests() == server.digests_of_fresh_load(checkpoint)
    check_answer(server, checkpoint, version)


USUAL = {
    "update_weight_mode": "full",
    "update_weight_transport": "nccl",
}


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Provide slime's module with the names of its updaters."""
    module = ModuleType("slime.backends.megatron_utils.actor")
    vars(module)["UpdateWeightFromDistributed"] = "slime's own"
    vars(module)["UpdateWeightFromTensor"] = "slime's own for --colocate"
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_slimes_actor_finds_the_updater(actor: ModuleType) -> None:
    slime.install(Namespace(**USUAL))
    assert vars(actor)["UpdateWeightFromDistributed"] is slime.WeightUpdater
    assert vars(actor)["UpdateWeightFromTensor"] is slime.WeightUpdater


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        (
            "update_weight_mode",
            "delta",
            "--update-weight-mode must be full with Windlass, got delta",
        ),
        ("update_weight_transport", "disk", "--update-weight-transport must be nccl"),
    ],
)
def test_slime_options_that_prevent_updates_are_refused(
    actor: ModuleType, option: str, given: object, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        slime.install(Namespace(**{**USUAL, option: given}))
    assert vars(actor)["UpdateWeightFromDistributed"] == "slime's own"


def test_host_copies_are_found_by_their_order_while_an_update_runs() -> None:
    chunks = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    chunks[1].register_buffer("expert_bias", torch.zeros(2))
    tensors = [*chunks[0].parameters(), *chunks[1].parameters(), *chunks[1].buffers()]
    given = {f"slime {i}": torch.full_like(t, i) for i, t in enumerate(tensors)}
    copies = slime.HostCopies(chunks, lambda: given)
    with copies.loaded():
        for index, tensor in enumerate(tensors):
            assert torch.equal(copies.copy_of(tensor), torch.full_like(tensor, index))
    with pytest.raises(PlanError, match="loaded only during an update"):
        copies.copy_of(tensors[0])
    del given["slime 1"]
    with pytest.raises(PlanError, match="one copy of each of 5 tensors, got 4"):
        copies.load()


def test_a_checkpoint_that_does_not_say_its_family_is_refused(tmp_path: Path) -> None:
    args = Namespace(
        hf_checkpoint=str(tmp_path), vocab_size=8, offload_rollout=False, offload_train=False
    )
    for content in (None, "{}", "no JSON"):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=f"--hf-checkpoint must be a folder.*got {tmp_path}"):
            slime.WeightUpdater(args, [], dict, model_name="x", quantization_config=None)
