"""A server's own table of weights is compared with what was learnt, and unsafe servers are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from http_answers import answering

from windlass.config import PauseMode, UpdateMode
from windlass.engines.capture.capture import Captured
from windlass.engines.sglang.settings import server_info
from windlass.engines.sglang.table.proof import check_agreement
from windlass.engines.sglang.table.routes import (
    ENABLING,
    Entry,
    ServerInfo,
    TableRoutes,
    WeightTable,
    refuse_unsafe_server,
)
from windlass.errors import (
    ConfigError,
    PeerUnreachable,
    PlanError,
    ProtocolError,
    UnsupportedLayout,
)
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.memory.packing import new_digest
from windlass.planning.planner import plan_transfer
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.receiver import Receiver
from windlass.transports.base import PeerEndpoint, RemoteRegion
from windlass.transports.memory import MemoryTransport
from windlass.updates.agents import EngineAgent
from windlass.updates.messages import BeginPush, ConnectRelay

SAFE: dict[str, Any] = {
    "version": "0.5.23",
    "device": "cpu",
    "launch_command": f"--model-path '/a b' {ENABLING} --tp-size 2",
}


def captured(*names: str) -> Captured:
    builder = ManifestBuilder("a/0", Role.ENGINE)
    for name in names:
        builder.add_parameter(name, nbytes=24, dtype=DType.FLOAT32, padding_nbytes=0)
        builder.add_shard(name, (6,), Box((0,), (6,)), name, offset_bytes=0, strides_bytes=(4,))
    addresses = tuple(range(4096, 4096 + 64 * len(names), 64))
    return Captured(builder.build(), addresses, (), (), ())


def table(**entries: Entry) -> WeightTable:
    return WeightTable("127.0.0.1:1", entries)


MODEL = {"a": torch.zeros(6), "b": torch.zeros(6)}
SIX = Entry(4096, 6, 4)


def test_a_table_of_the_same_names_and_sizes_agrees() -> None:
    check_agreement(table(a=SIX, b=SIX), MODEL, captured("a"))


@pytest.mark.parametrize(
    ("told", "learnt", "words"),
    [
        (table(a=SIX), captured("a"), "missing in the table: ['b']"),
        (table(a=SIX, b=SIX, c=SIX), captured("a"), "in the table only: ['c']"),
        (table(a=SIX, b=Entry(1, 6, 2)), captured("a"), "b (6, 2) instead of (6, 4)"),
        (table(a=SIX, b=SIX), captured("w_kc"), "not in the table: ['w_kc']"),
    ],
)
def test_what_the_table_lacks_or_has_otherwise_is_refused_by_name(
    told: WeightTable, learnt: Captured, words: str
) -> None:
    with pytest.raises(UnsupportedLayout) as refused:
        check_agreement(told, MODEL, learnt)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", "0.5.22"),
        ("pp_size", 2),
        ("dp_size", 2),
        ("nnodes", 2),
        ("enable_memory_saver", True),
        ("enable_lora", True),
        ("enable_eplb", True),
        ("enable_dp_attention", True),
        ("quantization", "fp8"),
        ("speculative_algorithm", "EAGLE"),
        ("cpu_offload_gb", 1),
        ("disaggregation_mode", "prefill"),
        ("load_format", "dummy"),
        ("launch_command", None),
    ],
)
def test_a_server_with_a_setting_that_updates_cannot_survive_is_refused(
    name: str, value: object
) -> None:
    refuse_unsafe_server(SAFE, "0.5.23")
    with pytest.raises(ConfigError, match=f"server: {name} must be"):
        refuse_unsafe_server({**SAFE, name: value}, "0.5.23")


def test_the_model_is_built_with_the_servers_own_options() -> None:
    info = msgspec.convert(SAFE, ServerInfo)
    assert info.arguments() == ("--model-path", "/a b", "--tp-size", "2")


@contextmanager
def serving(answers: dict[str, object]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers these routes with JSON, 400 the rest, and notes what it was asked."""
    asked: list[str] = []

    def answer(path: str, _asked: bytes) -> tuple[int, bytes]:
        asked.append(path)
        return 200 if path in answers else 400, json.dumps(answers.get(path)).encode()

    with answering(answer) as url:
        yield url, asked


def test_a_server_without_a_table_is_refused_with_the_option_that_makes_one() -> None:
    with serving({}) as (url, _), pytest.raises(UnsupportedLayout, match=ENABLING):
        TableRoutes(url, 1).table(0)


def test_an_engine_is_at_rest_only_if_every_rank_has_answered() -> None:
    rank = {"checksums": {}, "parallelism_info": [{"tp_rank": 0}]}
    answers: dict[str, object] = {
        "/pause_generation": {},
        "/weights_checker": {"success": True, "message": "", "ranks": [rank]},
        "/flush_cache": {},
    }
    with serving(answers) as (url, asked):
        TableRoutes(url, 1).pause(PauseMode.RETRACT, 5.0)
        assert asked == list(answers)
        with pytest.raises(PeerUnreachable, match=r"ranks must be 0\.\.1"):
            TableRoutes(url, 2).pause(PauseMode.RETRACT, 5.0)


def test_a_pause_that_keeps_caches_of_old_weights_is_refused() -> None:
    with serving({"/pause_generation": {}}) as (url, asked):
        with pytest.raises(ConfigError, match=r"must be abort or retract .* got in_place"):
            TableRoutes(url, 1).pause(PauseMode.IN_PLACE, 5.0)
        assert asked == []
        with pytest.raises(PeerUnreachable, match="weights_checker"):
            TableRoutes(url, 1).pause(PauseMode.RETRACT, 5.0)


def test_an_engine_that_refuses_to_empty_its_caches_is_not_at_rest() -> None:
    rank = {"checksums": {}, "parallelism_info": [{"tp_rank": 0}]}
    checked = {"success": True, "message": "", "ranks": [rank]}
    with serving({"/pause_generation": {}, "/weights_checker": checked}) as (url, _):
        for mode in (PauseMode.RETRACT, PauseMode.ABORT):
            with pytest.raises(PeerUnreachable, match="flush_cache"):
                TableRoutes(url, 1).pause(mode, 5.0)


@pytest.mark.parametrize(
    ("setting", "value"), [("hicache_storage_backend", "file"), ("enable_lmcache", True)]
)
def test_caches_that_no_flush_empties_are_refused(setting: str, value: object) -> None:
    with (
        serving({"/server_info": {**SAFE, setting: value}}) as (url, _),
        pytest.raises(ConfigError, match=f"{setting} must be .*old weights"),
    ):
        refuse_unsafe_server(server_info(url), "0.5.23")


class There:
    """Parameters of another process, which this test only names."""

    def __init__(self) -> None:
        self.endpoint = PeerEndpoint("memory", "there", "1")
        self.regions: tuple[RemoteRegion, ...] = (RemoteRegion(self.endpoint, 4096, 24),)
        self.addresses: tuple[int, ...] = (4096,)
        self.num_fetched = 0

    def fetch(self) -> None:
        self.num_fetched += 1


def test_an_engine_without_an_agent_takes_part_in_no_relay_and_no_update_by_hand() -> None:
    transport, learnt = MemoryTransport(), captured("a")
    receiver = Receiver(transport, learnt.manifest, learnt.addresses, (), There())
    agent = EngineAgent(receiver, RestingEngine())
    try:
        for command in (BeginPush(), ConnectRelay((), (), ())):
            with pytest.raises(ProtocolError, match="a process without an agent"):
                agent.handle(command, epoch=1, round_number=1)
    finally:
        agent.close()
        transport.close()


def test_parameters_of_another_process_are_written_in_place_and_verified_as_copies() -> None:
    transport, learnt, there = MemoryTransport(), captured("a"), There()
    copies = torch.arange(6, dtype=torch.float32)
    receiver = Receiver(transport, learnt.manifest, (copies.data_ptr(),), (), there)
    trainer = ManifestBuilder("t/0", Role.TRAINER)
    trainer.add_parameter("a", nbytes=24, dtype=DType.FLOAT32, padding_nbytes=0)
    trainer.add_shard("a", (6,), Box((0,), (6,)), "a", offset_bytes=0, strides_bytes=(4,))
    plan = plan_transfer([trainer.build()], [learnt.manifest]).for_destination("a/0")
    with pytest.raises(PlanError, match="mode must be in_place"):
        receiver.connect(plan, UpdateMode.STAGED)
    binding = receiver.connect(plan, UpdateMode.IN_PLACE)
    assert (binding.endpoint, binding.regions, binding.parameter_addresses) == (
        there.endpoint,
        there.regions,
        there.addresses,
    )
    digest = new_digest()
    digest.update(copies.numpy().tobytes())
    assert receiver.verify(0, {"t/0": digest.hexdigest()}) == ()
    assert there.num_fetched == 1
    copies[3] = 9
    assert receiver.verify(0, {"t/0": digest.hexdigest()}) == ("t/0",)
    transport.close()
