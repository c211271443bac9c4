"""The agent of an SGLang server without Windlass: refusals, pauses over the server's routes, and copies of weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from http_answers import answering
from memory_transport import MemoryTransport

from windlass.config import DiskBackend, PauseMode, PushBackend, UpdateMode
from windlass.control.connect_messages import ConnectEngine
from windlass.control.engine_agent import EngineAgent
from windlass.control.messages import BeginDriven, Verify
from windlass.engines.capture.description import Captured, Rounding
from windlass.engines.http import EngineHttp
from windlass.engines.sglang.hook import described
from windlass.engines.sglang.outside import MIXED, OutsideHooks
from windlass.engines.sglang.table import (
    ENABLING,
    Entry,
    LayoutFile,
    Parameter,
    RankLayout,
    WeightTable,
    config_digest,
    match,
    read_table,
    require_captured,
)
from windlass.errors import (
    ConfigError,
    PeerUnreachable,
    PlanError,
    ProtocolError,
    UnsupportedLayout,
    WindlassError,
)
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.planner import plan_transfer
from windlass.testing.peer_process import digest_of
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.receiver import Receiver
from windlass.transports.peers import PeerEndpoint, RemoteRegion

TABLE = WeightTable("127.0.0.1:1", {"a": Entry(4096, 6, 4), "b": Entry(8192, 2, 4)})
CAPTURED = {"a": Parameter((2, 3), "float32", 4), "b": Parameter((2,), "float32", 4)}
SETTINGS: dict[str, object] = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "dtype": "bfloat16"}
TABLE_PATH = "/remote_instance_transfer_engine_info?rank=0"


def manifest(worker: str, role: Role, *names: str) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    for name in names:
        builder.add_parameter(name, nbytes=24, dtype=DType.FLOAT32)
        builder.add_shard(name, (6,), Box((0,), (6,)), name)
    return builder.build()


def table_of(session: str = TABLE.session, **entries: Entry) -> dict[str, object]:
    told = WeightTable(session, entries or TABLE.entries)
    return {"rank": 0, "remote_instance_transfer_engine_info": msgspec.to_builtins(told)}


class Server:
    """Routes of an SGLang server.

    Attributes:
        asked: paths and bodies of the POST requests, in order.
        refuses: number of flushes that the server refuses.
    """

    def __init__(self, **info: object) -> None:
        self.label = "default"
        self.info: dict[str, object] = {
            **SAFE, **SETTINGS, "version": "0.5.23", **info,
        }  # fmt: skip
        self.model: dict[str, object] = {"model_path": "/nowhere"}
        self.table: dict[str, object] = table_of()
        self.asked: list[tuple[str, Any]] = []
        self.refuses = 0

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        got: Mapping[str, object] = {
            "/server_info": self.info,
            "/model_info": {**self.model, "weight_version": self.label},
            TABLE_PATH: self.table,
        }
        if path in got:
            return 200, json.dumps(got[path]).encode()
        self.asked.append((path, json.loads(body)))
        if path == "/flush_cache" and self.refuses:
            self.refuses -= 1
            return 400, b"pending requests"
        if path == "/update_weight_version":
            self.label = json.loads(body)["new_version"]
        return 200, b"{}"

    @contextmanager
    def serving(self) -> Iterator[EngineHttp]:
        with answering(self.answer) as url:
            yield EngineHttp(url)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def _safe() -> dict[str, object]:
    from windlass.engines.sglang.spec import RULES

    return {rule.settings[0]: rule.allowed[0] for rule in RULES if rule.settings}


SAFE = _safe()


def layout(**changes: Any) -> LayoutFile:
    own = RankLayout(manifest=b"", parameters=CAPTURED, derived={})
    file = LayoutFile(
        engine="sglang", version="0.5.23", config_digest="", settings=SETTINGS, ranks=(own,)
    )
    return msgspec.structs.replace(file, **changes)


def test_a_table_with_the_captured_names_and_sizes_matches() -> None:
    match(0, CAPTURED, TABLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": None}, "rank 3: the server's table must contain a, as the layout does"),
        ({"c": Entry(1, 2, 4)}, "rank 3: the layout must contain c, as the server's table does"),
        ({"a": Entry(4096, 7, 4)}, "rank 3: numel of a must be 6 as in the layout, got 7"),
        ({"b": Entry(8192, 2, 2)}, "rank 3: element size of b must be 4 as in the layout, got 2"),
    ],
)
def test_the_first_difference_between_table_and_layout_is_refused(
    change: dict[str, Entry | None], words: str
) -> None:
    entries = {n: e for n, e in {**TABLE.entries, **change}.items() if e is not None}
    with pytest.raises(UnsupportedLayout, match=words):
        match(3, CAPTURED, WeightTable(TABLE.session, entries))


def test_a_server_as_captured_is_accepted() -> None:
    with Server().serving() as server:
        require_captured(server, layout())
        assert read_table(server, 0) == TABLE


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"version": "0.5.22"}, r"version must be '0\.5\.23' as in the captured layout"),
        ({"dtype": "float16"}, "dtype must be 'bfloat16' as in the captured layout, got 'float16'"),
        ({"enable_memory_saver": True}, "enable_memory_saver must be"),
    ],
)
def test_a_server_with_other_settings_is_refused(info: dict[str, object], words: str) -> None:
    with (
        Server(**info).serving() as server,
        pytest.raises(ConfigError, match=words.replace("_", "[_-]")),
    ):
        require_captured(server, layout())


def test_a_server_with_stages_is_refused() -> None:
    settings = {**SETTINGS, "pp_size": 2}
    own = layout().ranks[0]
    with (
        Server(pp_size=2).serving() as server,
        pytest.raises(ConfigError, match="pp_size must be 1"),
    ):
        require_captured(server, layout(settings=settings, ranks=(own, own)))


def test_a_derived_tensor_is_refused_by_name() -> None:
    own = msgspec.structs.replace(layout().ranks[0], derived={"w_kc": "SGLang computes it"})
    with (
        Server().serving() as server,
        pytest.raises(UnsupportedLayout, match=r"w_kc cannot be updated .* SGLang computes it"),
    ):
        require_captured(server, layout(ranks=(own,)))


def test_a_model_with_encoders_is_refused() -> None:
    served = Server()
    served.model["has_image_understanding"] = True
    with served.serving() as server, pytest.raises(UnsupportedLayout, match="no encoders"):
        require_captured(server, layout())


def test_another_model_is_refused_if_its_folder_is_here(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "transformers_version": "5"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    digest = config_digest(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_version": "6"}))
    served = Server()
    served.model["model_path"] = str(tmp_path)
    with served.serving() as server:
        require_captured(server, layout(config_digest=digest))
        (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 16}))
        with pytest.raises(ConfigError, match="must be that of the captured model"):
            require_captured(server, layout(config_digest=digest))


def test_a_server_without_a_table_is_refused_with_the_option_that_makes_one() -> None:
    with (
        answering(lambda _path, _body: (400, b"{}")) as url,
        pytest.raises(PeerUnreachable, match=ENABLING),
    ):
        read_table(EngineHttp(url), 0)


def test_a_file_that_is_no_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "layout").write_text("{}")
    with pytest.raises(ConfigError, match="--layout must be a file that `windlass capture`"):
        LayoutFile.read(tmp_path / "layout")


def test_a_pause_ends_when_the_caches_are_flushed_and_marks_the_server() -> None:
    served = Server()
    served.refuses = 2
    with served.serving() as server:
        hooks = OutsideHooks(server, 0, TABLE)
        hooks.pause("1.1", PauseMode.ABORT, 5.0)
        assert served.paths == [
            "/pause_generation", *["/flush_cache"] * 3, "/update_weight_version",
        ]  # fmt: skip
        assert served.asked[0][1] == {"mode": "abort"}
        assert served.label == MIXED
        hooks.set_version(7, 5.0)
        hooks.resume(5.0)
        assert served.label == "7"
        assert served.paths[-1] == "/continue_generation"
        hooks.resume(5.0)
        assert served.paths.count("/continue_generation") == 1


def test_an_aborted_update_restores_the_name_of_the_version() -> None:
    served = Server()
    served.label = "6"
    with served.serving() as server:
        hooks = OutsideHooks(server, 0, TABLE)
        hooks.pause("1.1", PauseMode.RETRACT, 5.0)
        assert served.label == MIXED
        hooks.resume(5.0)
    assert served.label == "6"
    assert served.paths[-1] == "/continue_generation"


@pytest.mark.parametrize(
    ("table", "mode", "error"),
    [
        (table_of(a=Entry(4097, 6, 4), b=Entry(8192, 2, 4)), PauseMode.ABORT, PeerUnreachable),
        (table_of("127.0.0.1:2"), PauseMode.ABORT, PeerUnreachable),
        (table_of(), PauseMode.IN_PLACE, ConfigError),
    ],
)
def test_a_restarted_server_or_a_mode_that_keeps_caches_is_not_paused(
    table: dict[str, object], mode: PauseMode, error: type[WindlassError]
) -> None:
    served = Server()
    served.table = table
    with served.serving() as server, pytest.raises(error):
        OutsideHooks(server, 0, TABLE).pause("1.1", mode, 5.0)
    assert served.asked == []


def test_a_pause_fails_if_the_caches_are_never_flushed() -> None:
    served = Server()
    served.refuses = 1000
    with served.serving() as server, pytest.raises(PeerUnreachable, match="pending requests"):
        OutsideHooks(server, 0, TABLE).pause("1.1", PauseMode.ABORT, 0.3)
    assert served.label == "default"


class There:
    """Parameters of another process, which this test only names."""

    def __init__(self) -> None:
        self.endpoint = PeerEndpoint("memory", "there", "1")
        self.regions = (RemoteRegion(self.endpoint, 4096, 24),)
        self.addresses: tuple[int, ...] = (4096,)
        self.num_fetched = 0

    def fetch(self) -> None:
        self.num_fetched += 1


def test_parameters_of_another_process_are_written_in_place_and_verified_as_copies() -> None:
    transport, engine, there = MemoryTransport(), manifest("a/0", Role.ENGINE, "a"), There()
    copies = torch.arange(6, dtype=torch.float32)
    receiver = Receiver(transport, engine, (copies.data_ptr(),), (), there)
    plan = plan_transfer([manifest("t/0", Role.TRAINER, "a")], [engine])
    part = plan.parts(sending=False, all_names=True)["a/0"]
    with pytest.raises(PlanError, match="mode must be in_place"):
        receiver.connect(part, UpdateMode.STAGED)
    binding = receiver.connect(part, UpdateMode.IN_PLACE)
    assert (binding.endpoint, binding.regions, binding.parameter_addresses) == (
        there.endpoint, there.regions, there.addresses,
    )  # fmt: skip
    digest = digest_of(copies.numpy().tobytes())
    assert receiver.verify(0, {"t/0": digest}) == ()
    assert there.num_fetched == 1
    copies[3] = 9
    assert receiver.verify(0, {"t/0": digest}) == ("t/0",)
    transport.close()


class Changed(There):
    """Parameters of another process in which that process changes a value, and copies of them in this process."""

    def __init__(self, copies: torch.Tensor) -> None:
        super().__init__()
        self._copies = copies

    def fetch(self) -> None:
        self._copies[1, 3] = -7


def test_change_of_a_kept_tensor_in_another_process_is_noticed_in_the_same_update() -> None:
    transport, engine = MemoryTransport(), manifest("a/0", Role.ENGINE, "a", "b")
    copies = torch.arange(12, dtype=torch.float32).view(2, 6)
    there = Changed(copies)
    there.regions = (RemoteRegion(there.endpoint, 4096, 48),)
    there.addresses = (4096, 4120)
    addresses = tuple(row.data_ptr() for row in copies)
    agent = EngineAgent(Receiver(transport, engine, addresses, (), there), RestingEngine())
    plan = plan_transfer([manifest("t/0", Role.TRAINER, "a")], [engine.without({"b"})])
    plan = replace(plan, destination_digests=(engine.digest(),))
    command = ConnectEngine(plan.encode(), "", UpdateMode.IN_PLACE, kept=("b",))
    agent.handle(command, epoch=1, round_number=1)
    digest = digest_of(copies[0].numpy().tobytes())
    with pytest.raises(PlanError, match="keep: 'b' of a/0 must not change"):
        agent.handle(Verify(0, {"t/0": digest}), epoch=1, round_number=2)
    agent.close()
    transport.close()


def test_only_one_sided_updates_reach_an_engine_without_windlass() -> None:
    transport, engine = MemoryTransport(), manifest("a/0", Role.ENGINE, "a")
    agent = EngineAgent(Receiver(transport, engine, (4096,), (), There()), RestingEngine())
    disk = DiskBackend("/nowhere")
    for command in (
        BeginDriven(PushBackend()),
        ConnectEngine(b"", "", UpdateMode.IN_PLACE, backend=disk),
    ):
        with pytest.raises(ProtocolError, match=r"must be p2p for an engine .* without Windlass"):
            agent.handle(command, epoch=1, round_number=1)
    agent.close()
    transport.close()


def test_a_layout_names_what_only_the_engine_can_compute() -> None:
    model = torch.nn.Linear(6, 1, bias=False)
    received = (torch.zeros(6),)
    captured = Captured(manifest("x/0", Role.ENGINE, "weight", "cache"), (1, 2), (), (), ())
    found = described(model, captured)
    assert found.parameters == {"weight": Parameter((1, 6), "float32", 4)}
    assert found.derived == {"cache": "SGLang's table has parameters only"}
    rounding = Rounding("weight", {"weight": received}, DType.BFLOAT16, received, received)
    rounded = described(model, replace(captured, roundings=(rounding,)))
    assert rounded.derived["weight"] == "SGLang rounds it to the dtype of the checkpoint"
    assert ShardManifest.decode(rounded.manifest).digest() == captured.manifest.digest()
