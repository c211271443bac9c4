"""Common mistakes in arguments are refused at once, with the argument, the rule and the value."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine

import windlass
from windlass.config import CollectiveFabric, PauseMode, RelayShape, UpdateMode
from windlass.errors import ConfigError, PeerTimeout, RoundAborted, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.rollout.controller import RolloutController
from windlass.rollout.directory import StaticEngines
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.messages import OnAbort
from windlass.testing.resting_engine import RestingEngine
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.trainers.pending_update import version_number
from windlass.transports.cma import CmaTransport
from windlass.transports.mooncake.native import MooncakeProtocol
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.nixl.native import NixlWire
from windlass.transports.nixl.transport import NixlConfig
from windlass.transports.registry import parse_transport

TOKEN = "a token"
SAMPLING = windlass.SamplingParams(max_new_tokens=1)


def test_settings_convert_names_to_enum_members() -> None:
    """The code compares members by identity: with a plain string, no engine would ever pause."""
    config = windlass.ControlConfig(mode="staged", pause_mode="retract")  # type: ignore[arg-type]
    assert config.mode is UpdateMode.STAGED
    assert config.pause_mode is PauseMode.RETRACT
    assert windlass.P2pBackend(relay="chain").relay is RelayShape.CHAIN  # type: ignore[arg-type]
    xccl = windlass.XcclBackend(fabric="gloo")  # type: ignore[arg-type]
    assert xccl.fabric is CollectiveFabric.GLOO
    assert RolloutConfig(on_abort="retry").on_abort is OnAbort.RETRY  # type: ignore[arg-type]
    mooncake = MooncakeConfig(protocol="tcp")  # type: ignore[arg-type]
    assert mooncake.protocol is MooncakeProtocol.TCP
    assert NixlConfig(wire="rc").wire is NixlWire.RC  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"mode must be one of \['in_place', 'staged'\], got 'x'"):
        windlass.ControlConfig(mode="x")  # type: ignore[arg-type]


def connect(module: Any, **options: Any) -> object:
    return windlass.connect_trainer(module, controller="http://127.0.0.1:9", token=TOKEN, **options)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 2, device="meta"), torch.eye(3).to_sparse(), torch.ones(2).to(torch.complex64)],
)
def test_a_tensor_that_cannot_be_described_is_refused_by_name(tensor: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.odd = torch.nn.Parameter(tensor, requires_grad=False)
    with pytest.raises(UnsupportedLayout, match=r"'odd': .* got .*(meta device|sparse|complex)"):
        connect(module)


def test_a_disk_backend_accepts_a_path_object() -> None:
    assert windlass.DiskBackend(folder=Path("/weights")).folder == "/weights"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: windlass.ControlConfig(backend="p2p"), "backend must be a P2pBackend.* got 'p2p'"),  # type: ignore[arg-type]
        (lambda: windlass.ControlConfig(deadlines=5.0), "deadlines must be PhaseDeadlines"),  # type: ignore[arg-type]
        (lambda: windlass.ControlConfig(heartbeat_s=0.0), "heartbeat_s must be > 0, got 0.0"),
        (lambda: windlass.ControlConfig(max_message_nbytes=0), "max_message_nbytes must be >= 1"),
        (lambda: RolloutConfig(max_attempts=0), "max_attempts must be >= 1, got 0"),
        (lambda: RolloutConfig(attempt_deadline_s=0.0), "attempt_deadline_s must be > 0, got 0.0"),
        (lambda: RolloutConfig(affinity_slack=-1), "affinity_slack must be >= 0, got -1"),
        (lambda: windlass.BatchClient("localhost:1", TOKEN), r"url must be http.* got 'localhost:1'"),
        (lambda: windlass.RolloutCallback("ftp://h", TOKEN), "controller must be http or https://host"),
        (lambda: windlass.RolloutCallback("http://h:99999", TOKEN), "controller must be http"),
        (lambda: windlass.RolloutCallback("http://h", TOKEN, stage=0), "stage must be in .0, num_stages=0., got 0"),
        (lambda: windlass.RolloutCallback("http://h", TOKEN, deadline_s=0), "deadline_s must be > 0, got 0"),
        (lambda: windlass.BatchClient("http://h", TOKEN).next_batch(0, 2, 2, deadline_s=1), "rank must be in .0, world_size=2., got 2"),
        (lambda: windlass.BatchClient("http://h", TOKEN).next_batch(-1, 0, 1, deadline_s=1), "step must be >= 0, got -1"),
        (lambda: windlass.BatchClient("http://h", TOKEN).next_batch(0, 0, 1, deadline_s=0), "deadline_s must be > 0, got 0"),
        (lambda: windlass.Controller(token=TOKEN, port=99999), "port must be an integer in .0, 65535., got 99999"),
        (lambda: windlass.PhaseDeadlines(write_s="5"), "write_s must be > 0, got '5'"),  # type: ignore[arg-type]
        (lambda: windlass.ControlConfig(min_engines="1"), "min_engines must be an integer >= 1, got '1'"),  # type: ignore[arg-type]
        (lambda: windlass.ControlConfig(max_rewrites=1.5), "max_rewrites must be an integer >= 0, got 1.5"),  # type: ignore[arg-type]
        (lambda: windlass.StalenessPolicy(2.5, 1, 1), "max_staleness must be an integer >= 0, got 2.5"),  # type: ignore[arg-type]
        (lambda: windlass.StalenessPolicy(2, 0, 1), "batch_size must be >= 1, got 0"),
        (lambda: windlass.SamplingParams(max_new_tokens=1, temperature=float("nan")), "temperature must be >= 0 and finite, got nan"),
        (lambda: windlass.SamplingParams(max_new_tokens=1, top_k=0), "top_k must be >= 1, or -1 for all, got 0"),
        *(
            (lambda key=key, value=value: windlass.SamplingParams(**{"max_new_tokens": 1, key: value}), f"sampling: {says}")
            for key, value, says in (
                ("max_new_tokens", "8", "max_new_tokens must be an integer >= 1, got '8'"),
                ("max_new_tokens", None, "max_new_tokens must be an integer >= 1, got None"),
                ("temperature", np.float32(1), "temperature must be a Python int or float, got "),
                ("temperature", float("inf"), "temperature must be >= 0 and finite, got inf"),
                ("temperature", "hot", "temperature must be a Python int or float, got 'hot'"),
                ("temperature", True, "temperature must be a Python int or float, got True"),
                ("top_p", "0.5", r"top_p must be a Python int or float, got '0.5'"),
                ("top_p", 0, r"top_p must be in \(0, 1\], got 0"),
                ("top_k", 1.5, "top_k must be >= 1, or -1 for all, got 1.5"),
                ("stop_token_ids", 7, "stop_token_ids must be a tuple of integers, got 7"),
                ("stop_token_ids", ("7",), r"stop_token_ids must be a tuple of integers, got \('7',\)"),
                ("min_p", 1.5, r"min_p must be in \[0, 1\], got 1.5"),
                ("repetition_penalty", 0, "repetition_penalty must be > 0 and finite, got 0"),
                ("min_new_tokens", 2, "min_new_tokens must be <= max_new_tokens=1, got 2"),
                ("stop", ".", "stop must be a tuple of texts, none of them empty, got '.'"),
                ("stop", ("",), "stop must be a tuple of texts, none of them empty"),
                ("json_schema", {}, "json_schema must be text, got {}"),
                ("ignore_eos", "yes", "ignore_eos must be true or false, got 'yes'"),
                ("adapter", 3, "adapter must be text, got 3"),
            )
        ),
        (lambda: windlass.DiskBackend(folder=None), "folder must be an absolute path, got None"),  # type: ignore[arg-type]
        (lambda: windlass.Controller(token=TOKEN, config={"mode": "staged"}), "config must be ControlConfig, got {'mode'"),  # type: ignore[arg-type]
        (lambda: windlass.Controller(token=TOKEN, staleness=2), "staleness must be StalenessPolicy, got 2"),  # type: ignore[arg-type]
        (lambda: connect({"w": torch.ones(2)}), "module must be a torch.nn.Module, got dict"),
        (lambda: connect(torch.nn.Linear(2, 2), transport=5), "transport must be the name of a transport or .* got 5"),
        (lambda: connect(torch.nn.Linear(2, 2), name_map=lambda _: 7), "name or None for 'weight', got 7"),
        (lambda: parse_transport("cmaa"), "transport must be one of .* got 'cmaa'"),
        (lambda: version_number("v1", "publish"), "publish: version must be an integer >= 0, got 'v1'"),  # type: ignore[arg-type]
        (lambda: version_number(-1, "publish"), "version must be an integer >= 0, got -1"),
        (lambda: version_number(1 << 53, "publish"), r"version must be < 2\^53, got 9007199254740992"),
        (lambda: version_number(1.0, "publish"), "version must be an integer >= 0, got 1.0"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_impossible_value_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize("version", [np.int64(7), torch.tensor(7), 7])
def test_a_version_may_be_any_integer_scalar(version: int) -> None:
    """The counter of a training loop often is such a scalar, which frames cannot encode."""
    assert type(version_number(version, "publish")) is int


class Watched(WrappedTransport):
    """Transport that counts its calls of `close`."""

    def __init__(self) -> None:
        super().__init__(CmaTransport())
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1
        super().close()


@contextmanager
def trainer_transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    transport = Watched()
    monkeypatch.setattr("windlass.trainers.fsdp.create_transport", lambda *_, **__: transport)
    yield transport
    assert transport.num_closed == 1


@pytest.mark.parametrize(
    ("controller", "arena_nbytes", "says"),
    [
        ("localhost:8000", 0, "controller must be http or https://host.* got 'localhost:8000'"),
        ("http://127.0.0.1:8000", 5, "arena_nbytes: must be 0 or at least 128, got 5"),
    ],
)
def test_a_trainer_that_fails_to_connect_leaves_no_transport_open(
    monkeypatch: pytest.MonkeyPatch, controller: str, arena_nbytes: int, says: str
) -> None:
    with trainer_transport(monkeypatch), pytest.raises(ConfigError, match=says):
        windlass.connect_trainer(
            torch.nn.Linear(2, 2), controller=controller, token=TOKEN, arena_nbytes=arena_nbytes
        )


def test_an_engine_that_fails_to_connect_leaves_no_transport_open() -> None:
    transport = Watched()
    builder = ManifestBuilder("engine/0", Role.ENGINE)
    with pytest.raises(ConfigError, match="controller must be http or https://host"):
        windlass.EngineClient(
            windlass.EngineWeights(
                manifest=builder.build(),
                addresses=(),
                regions=(),
            ),
            transport=transport,
            hooks=RestingEngine(),
            controller="localhost:8000",
            token=TOKEN,
        )
    assert transport.num_closed == 1


async def test_paths_may_be_strings(tmp_path: Path) -> None:
    rounds, rollouts = str(tmp_path / "rounds"), str(tmp_path / "rollouts")
    async with windlass.Controller(
        token=TOKEN,
        journal_path=rounds,  # type: ignore[arg-type]
        rollout_config=RolloutConfig(journal=rollouts),  # type: ignore[arg-type]
    ):
        pass
    assert all(len(path.read_bytes()) > 0 for path in (Path(rounds), Path(rollouts)))


async def test_a_prompt_without_plain_integers_is_refused() -> None:
    """Otherwise the controller would send an undecodable batch to the worker forever."""
    policy = windlass.StalenessPolicy.unbounded(1)
    async with (
        FakeEngine("a") as engine,
        RolloutController(StaticEngines([("a", engine.url, 0)]), policy) as rollouts,
    ):
        rollouts.run_here({})
        for prompt in ([1, 2], [True, 2], np.array([1, 2]), torch.tensor([1, 2])):
            handle = rollouts.submit(prompt, SAMPLING)  # type: ignore[arg-type]
            (rollout,) = await rollouts.wait([handle], deadline_s=60)
            assert rollout.prompt_ids == (1, 2)
            assert {type(token) for token in rollout.prompt_ids} == {int}
        for wrong in ([1.5], ["a text"], [[1, 2]], [1 << 63]):
            with pytest.raises(ConfigError, match="prompt_ids must be integers"):
                rollouts.submit_group(wrong, 2, SAMPLING)  # type: ignore[arg-type]
        for empty in ((), np.array([], np.int64)):
            with pytest.raises(ConfigError, match="prompt_ids must not be empty"):
                rollouts.submit(empty, SAMPLING)  # type: ignore[arg-type]
        odd = windlass.SamplingParams(max_new_tokens=1 << 64)
        with pytest.raises(ConfigError, match="sampling must be SamplingParams"):
            rollouts.submit([1], odd)
        with pytest.raises(ConfigError, match="deadline_s must be > 0, got nan"):
            rollouts.submit([1], SAMPLING, deadline_s=float("nan"))
        await asyncio.sleep(0)


async def test_a_controller_refuses_a_string_of_names_and_has_no_url_before_start() -> None:
    controller = windlass.Controller(token=TOKEN)
    with pytest.raises(ConfigError, match="url is not known before"):
        _ = controller.url
    async with controller:
        with pytest.raises(
            ConfigError, match="engines must be a sequence of names, got 'engine-a'"
        ):
            await controller.wait_for_fleet(num_trainers=0, engines="engine-a", deadline_s=1)
        with pytest.raises(ConfigError, match="wait_for_version: engines must be a sequence"):
            await controller.wait_for_version(0, engines="engine-a", deadline_s=1)


async def test_a_rank_publishes_in_one_thread_at_a_time() -> None:
    """A second announcement would replace the first, and the first caller would wait forever."""
    async with windlass.Controller(token=TOKEN) as controller:

        def publish_beside() -> None:
            module = torch.nn.Linear(2, 2)
            with windlass.connect_trainer(
                module, controller=controller.url, token=TOKEN
            ) as trainer:
                # No engine is connected, so the update runs until its deadline.
                pending = trainer.publish(0, wait=False, deadline_s=2.0)
                with pytest.raises(
                    ConfigError, match="the previous update must end before version"
                ):
                    trainer.publish(1)
                with pytest.raises(PeerTimeout):
                    pending.result(deadline_s=30)
                with pytest.raises(PeerTimeout):
                    trainer.publish(1, deadline_s=0.2)

        await asyncio.to_thread(publish_beside)


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("", "token must not be empty, got ''"),
        (None, "token must not be empty, got None"),
        (
            "read from a file\n",
            "printable ASCII without blanks at its ends; remove these characters: .*n'.$",
        ),
        ("schl\u00fcssel", "must be printable ASCII"),
    ],
)
def test_every_client_refuses_a_token_that_no_header_can_carry(token: str, says: str) -> None:
    url = "http://127.0.0.1:9"
    for use in (
        lambda: windlass.Controller(token=token),
        lambda: windlass.connect_trainer(torch.nn.Linear(2, 2), controller=url, token=token),
        lambda: windlass.BatchClient(url, token),
        lambda: windlass.RolloutCallback(url, token),
    ):
        with pytest.raises(ConfigError, match=says):
            use()


@pytest.mark.parametrize("rollouts", [False, True])
async def test_a_controller_leaves_a_file_that_is_not_a_journal_unchanged(
    tmp_path: Path, rollouts: bool
) -> None:
    """The last line of a journal may be torn.

    The only line of another file is not a torn journal.
    """
    path = tmp_path / "config.json"
    path.write_bytes(b'{"lr": 1e-4}')
    with pytest.raises(ConfigError, match="must be a journal file, got a file that begins with"):
        async with windlass.Controller(
            token=TOKEN,
            journal_path=None if rollouts else path,
            rollout_config=RolloutConfig(journal=path if rollouts else None),
        ):
            pass
    assert path.read_bytes() == b'{"lr": 1e-4}'


async def test_a_controller_accepts_a_journal_with_a_torn_first_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for torn in (b"", b'{"ty', b'{"type":"started","epo'):
        path.write_bytes(torn)
        async with windlass.Controller(token=TOKEN, journal_path=path):
            pass
        assert path.read_bytes().startswith(b'{"type":"started"')


class Hooks:
    """Hooks of an engine that is always paused. They count the pauses."""

    num_pauses = 0

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        self.num_pauses += 1

    def resume(self, deadline_s: float) -> None: ...

    def finalise(self) -> None: ...

    def set_version(self, version: int, deadline_s: float) -> None: ...


@contextmanager
def engine(url: str, weight: torch.Tensor) -> Iterator[Hooks]:
    builder = ManifestBuilder("engine/0", Role.ENGINE)
    builder.add_parameter("weight", nbytes=weight.nbytes, dtype=DType.FLOAT32)
    builder.add_shard("weight", tuple(weight.shape), Box.full(tuple(weight.shape)), "weight")
    hooks, transport = Hooks(), CmaTransport()
    region = transport.register(weight.data_ptr(), weight.nbytes)
    with windlass.EngineClient(
        windlass.EngineWeights(
            manifest=builder.build(),
            addresses=(weight.data_ptr(),),
            regions=(region,),
        ),
        transport=transport,
        hooks=hooks,
        controller=url,
        token=TOKEN,
    ):
        yield hooks


async def test_a_trainer_with_another_transport_fails_before_engines_pause() -> None:
    """Otherwise an engine that is updated in place would end with mixed weights."""
    module, weight = torch.nn.Linear(2, 2, bias=False), torch.ones(2, 2)
    says = "trainer/0 cannot write to engine/0: .* at both ends, got shm at the source and cma at the destination"

    def update(url: str) -> None:
        with engine(url, weight) as hooks:
            with (
                windlass.connect_trainer(
                    module, controller=url, token=TOKEN, transport="shm"
                ) as trainer,
                pytest.raises(RoundAborted, match=says),
            ):
                trainer.publish(0)
            assert hooks.num_pauses == 0
            with windlass.connect_trainer(module, controller=url, token=TOKEN) as trainer:
                trainer.publish(1)
            assert torch.equal(weight, module.weight)

    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(update, controller.url)


async def test_a_failed_write_is_reported_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "v00000000").write_text("in the way")

    def update(url: str) -> None:
        module = torch.nn.Linear(2, 2, bias=False)
        with (
            engine(url, torch.ones(2, 2)),
            windlass.connect_trainer(module, controller=url, token=TOKEN) as trainer,
            pytest.raises(RoundAborted, match=r"trainer/0 -> engine/0: .*v00000000"),
        ):
            trainer.publish(0)

    config = windlass.ControlConfig(backend=windlass.DiskBackend(folder=str(tmp_path)))
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(update, controller.url)


async def test_a_publish_timeout_names_the_absent_controller_as_the_reason() -> None:
    connected, gone = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def update(url: str) -> None:
        module = torch.nn.Linear(2, 2, bias=False)
        with windlass.connect_trainer(module, controller=url, token=TOKEN) as trainer:
            loop.call_soon_threadsafe(connected.set)
            assert gone.wait(30)
            # The trainer notices within these seconds that the connection is closed.
            with pytest.raises(PeerTimeout, match="the controller is not connected: "):
                trainer.publish(0, deadline_s=2.0)

    async with windlass.Controller(token=TOKEN) as controller:
        updating = asyncio.create_task(asyncio.to_thread(update, controller.url))
        await connected.wait()
    gone.set()
    await updating


def test_a_callback_with_half_stepped_weights_pauses_no_engine() -> None:
    def refuse() -> None:
        raise ConfigError("half-stepped")

    with (
        windlass.RolloutCallback("http://127.0.0.1:9", "token", check_weights=refuse) as callback,
        # A PeerTimeout would mean that a request was sent.
        pytest.raises(ConfigError, match="half-stepped"),
    ):
        callback.pause_generation(deadline_s=30)
