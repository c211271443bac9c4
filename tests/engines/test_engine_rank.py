"""A rank of an engine is captured once and joins one fleet after another."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, Reaction, UpdateMode
from windlass.control.engine_state import HoldCause
from windlass.control.report import UpdateReport
from windlass.engines.capture.capture import capture
from windlass.engines.capture.checkpoint import checkpoint_specs
from windlass.engines.capture.description import Captured
from windlass.engines.capture.memory import held_by
from windlass.engines.capture.sleeping import unfilled, unfilled_ranges
from windlass.engines.engine_rank import EngineRank
from windlass.engines.held_server import HeldRecord, held_for
from windlass.engines.quiesce_gate import QuiesceGate
from windlass.engines.spec import AgentSettings, CapturedLayout, RankStep
from windlass.engines.vllm.api_server import RankAnswer, RankOrder, join_ranks
from windlass.errors import (
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
    RoundAborted,
    UnsupportedLayout,
)

TOKEN = "secret of the test"
URL, PORT = "http://engine", 8124
IN_PLACE = ControlConfig(mode=UpdateMode.IN_PLACE)
REFUSES_NAN = ControlConfig(mode=UpdateMode.IN_PLACE, non_finite=Reaction.REFUSE)


@dataclass
class Api:
    """API of an engine without requests. Its main loop is always between two steps."""

    gate: QuiesceGate
    versions: list[int] = field(default_factory=list)
    may_resume: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    may_quiesce: threading.Event = field(default_factory=threading.Event)
    refuses_resume: str = ""

    def __post_init__(self) -> None:
        self.may_resume.set()
        self.may_quiesce.set()

    def blocks(self, mode: PauseMode) -> bool:
        return False

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        return True

    def quiesce(self, pause_id: str, deadline_s: float, *, block: bool) -> None:
        assert not block
        self.asked.set()
        assert self.may_quiesce.wait(deadline_s)
        self.gate.quiesced(pause_id)

    def resume(self, deadline_s: float) -> None:
        assert self.may_resume.wait(deadline_s)
        if self.refuses_resume:
            raise PeerUnreachable(self.refuses_resume)

    def set_version(self, version: int, deadline_s: float) -> None:
        self.versions.append(version)


class Rank:
    """One rank of an engine that fuses two tensors into one parameter."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = torch.nn.Linear(6, 8, bias=False, dtype=dtype)
        self.checkpoint = checkpoint
        self.engine_rank = EngineRank()
        self.api = Api(self.engine_rank.gate)
        self.num_captures = 0

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        first = {"a": 0, "b": 4}
        for name, tensor in weights:
            self.model.weight.data[first[name] : first[name] + 4].copy_(tensor)

    def _capture(self, worker: str) -> Captured:
        self.num_captures += 1
        specs = checkpoint_specs(self.checkpoint)
        return capture(self.model, specs, self._load, worker=worker)

    def settings(self, url: str, *, name: str = "engine") -> AgentSettings:
        return AgentSettings(
            name=name, controller=url, transport="cma", url=URL, port=PORT, world_size=1,
            checkpoint=str(self.checkpoint),
        )  # fmt: skip

    def capture(self, url: str, *, name: str = "engine") -> AgentSettings:
        settings = self.settings(url, name=name)
        captures = partial(self._capture, f"{name}/0")
        self.engine_rank.capture(settings, 0, captures, lambda: self.api)
        return settings

    def join(self, url: str, *, name: str = "engine") -> None:
        self.engine_rank.join(self.capture(url, name=name), 0, TOKEN)

    def holds(self, trainer: torch.nn.ParameterDict) -> bool:
        expected = torch.cat([trainer["a"], trainer["b"]]).to(self.model.weight.dtype)
        return torch.equal(self.model.weight.data, expected)


class Core:
    """Client of vLLM's core. It carries out orders in the real rank, in a thread of its own."""

    core_engines = (0,)

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    async def _call_utility_async(
        self,
        _method: str,
        _order: str,
        _s: float,
        args: tuple[str, str],
        _named: None,
        *,
        engine: int,
    ) -> list[str]:
        assert engine == 0
        order = msgspec.json.decode(args[1], type=RankOrder)
        said = ""
        if order.step is RankStep.CAPTURE:
            await asyncio.to_thread(self._rank.capture, order.settings.controller)
            said = msgspec.json.encode(CapturedLayout(unplaced=(), buffer_nbytes=0)).decode()
        else:
            await asyncio.to_thread(self._rank.join, order.settings.controller)
        return [msgspec.json.encode(RankAnswer(said=said)).decode()]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    tensors = {n: torch.zeros(4, 6, dtype=torch.bfloat16) for n in ("a", "b")}
    save_file(tensors, tmp_path / "model.safetensors")
    yield Rank(tmp_path)
    # The test process continues without an engine.
    gc.unfreeze()


def weights(first: int) -> torch.nn.ParameterDict:
    values = torch.arange(first, first + 48, dtype=torch.float32).reshape(2, 4, 6)
    return torch.nn.ParameterDict({"a": values[0].clone(), "b": values[1].clone()})


async def test_a_rank_joins_one_fleet_after_another_with_one_capture(rank: Rank) -> None:
    for fleet, mode in enumerate([UpdateMode.STAGED, UpdateMode.IN_PLACE, UpdateMode.STAGED]):
        config = ControlConfig(mode=mode)
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            await asyncio.to_thread(rank.join, controller.url)
            trainer = weights(1 + 50 * fleet)
            report = await asyncio.to_thread(publish, trainer, controller.url, 3 - fleet)
            assert report.digest_ok
            assert rank.holds(trainer)
            assert gc.get_freeze_count() > 0, "a full collection would fall due in an update"
    assert rank.num_captures == 1
    assert rank.api.versions == [3, 2, 1]
    leave(rank)


async def test_a_connected_rank_does_not_change_its_controller(rank: Rank) -> None:
    async with (
        windlass.Controller(token=TOKEN) as controller,
        windlass.Controller(token=TOKEN) as other,
    ):
        await asyncio.to_thread(rank.join, controller.url)
        began_s = time.monotonic()
        # The capture refuses. So no rank of an engine has left its fleet when another rank refuses.
        named = f"engine [^ ]+: its controller {controller.url} must be stopped before"
        with pytest.raises(ProtocolError, match=named):
            await asyncio.to_thread(rank.capture, other.url)
        assert time.monotonic() - began_s < 10, (
            "the engine's main loop generates no tokens meanwhile"
        )
        trainer = weights(7)
        await asyncio.to_thread(publish, trainer, controller.url, 1)
        assert rank.holds(trainer)
    leave(rank)


async def test_refusal_of_a_join_does_not_call_an_ended_controller_connected(rank: Rank) -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        await asyncio.to_thread(publish, weights(1), controller.url, 1)
        rank.engine_rank.required()[2].pause("9.9", PauseMode.ABORT, 5.0)
        rank.api.may_resume.clear()
    with pytest.raises(ProtocolError, match="has not resumed since the connection was lost"):
        rank.join("http://127.0.0.1:1")
    rank.api.may_resume.set()
    leave(rank)


async def test_a_refused_rank_captures_again_from_the_right_folder(
    rank: Rank, tmp_path: Path
) -> None:
    """Check also the case that another rank of the engine refused, so that no rank joined."""
    right, wrong = rank.checkpoint, tmp_path / "wrong"
    wrong.mkdir()
    save_file({"a": torch.zeros(4, 6), "c": torch.zeros(3)}, wrong / "model.safetensors")
    async with windlass.Controller(token=TOKEN) as controller:
        rank.checkpoint = wrong
        with pytest.raises(UnsupportedLayout, match=r"loader failed.*KeyError: 'c'"):
            await asyncio.to_thread(rank.join, controller.url)
        rank.checkpoint = right
        await asyncio.to_thread(rank.capture, controller.url, name="first")
        await asyncio.to_thread(rank.join, controller.url)
        assert rank.num_captures == 3
        trainer = weights(5)
        await asyncio.to_thread(publish, trainer, controller.url, 1)
        assert rank.holds(trainer)
    leave(rank)


async def test_a_rank_keeps_its_name(rank: Rank) -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        with pytest.raises(ConfigError, match="as in the first join"):
            await asyncio.to_thread(rank.join, controller.url, name="another")
    leave(rank)


async def test_rank_without_weights_keeps_its_layout_under_a_new_name(
    rank: Rank, tmp_path: Path
) -> None:
    """A framework frees the weights before the first join. A new capture would read them."""
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(rank.capture, controller.url, name="first")
        rank.engine_rank.sleep.is_enabled = rank.engine_rank.sleep.is_lost = True
        right, rank.checkpoint = rank.checkpoint, tmp_path / "other"
        with pytest.raises(ConfigError, match="as before the engine slept"):
            await asyncio.to_thread(rank.capture, controller.url, name="second")
        rank.checkpoint = right
        await asyncio.to_thread(rank.join, controller.url, name="second")
        assert rank.num_captures == 1
        assert rank.engine_rank.captured.manifest.worker == "second/0"
        trainer = weights(9)
        report = await asyncio.to_thread(publish, trainer, controller.url, 1)
        assert report.engines == ("second",)
        assert rank.holds(trainer)
    leave(rank)


@pytest.mark.parametrize("is_blocked", [False, True])
async def test_server_that_lost_its_weights_joins_another_controller_unless_it_is_blocked(
    rank: Rank, is_blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller dies while an update fills a server that slept."""
    monkeypatch.setattr(tempfile, "tempdir", str(rank.checkpoint))
    gate = rank.engine_rank.gate
    async with windlass.Controller(token=TOKEN, config=IN_PLACE) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        lose(rank)
        rank.api.may_quiesce.clear()
        publishing = partial(publish, weights(1), controller.url, 1, deadline_s=5.0)
        published = asyncio.create_task(asyncio.to_thread(publishing))
        assert await asyncio.to_thread(rank.api.asked.wait, 30)
    with ExitStack() as loop:
        if is_blocked:
            loop.enter_context(gate.held())
        rank.api.may_quiesce.set()
        await asyncio.to_thread(wait_until_held)
        async with windlass.Controller(token=TOKEN, config=IN_PLACE) as other:
            server = SimpleNamespace(engine_core=Core(rank))
            joining = join_ranks(server, rank.settings(other.url), TOKEN, pauses_itself=True)
            if is_blocked:
                with pytest.raises(
                    ProtocolError, match=f"no weights.* {controller.url} has filled"
                ):
                    await joining
            else:
                await joining
                assert held_for(PORT) is None
                trainer = weights(9)
                await asyncio.to_thread(publish, trainer, other.url, 1)
                assert rank.holds(trainer)
    with pytest.raises(PeerTimeout):
        await published
    leave(rank)


async def test_server_says_why_it_waits_after_an_aborted_first_version(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was started with made-up weights, so it stays paused without any version."""
    monkeypatch.setattr(tempfile, "tempdir", str(rank.checkpoint))
    async with windlass.Controller(token=TOKEN, config=REFUSES_NAN) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        assert held_for(PORT) is None, "no round has paused the engine yet"
        await refuse_nan(controller.url, 1)
        held = await asyncio.to_thread(wait_until_held)
        assert held.cause is HoldCause.NO_VERSION
        assert "has no version yet" in held.reason
        assert controller.url in held.reason
        await asyncio.to_thread(publish, weights(1), controller.url, 2)
        assert held_for(PORT) is None
    leave(rank)


async def test_server_says_that_its_weights_are_lost_if_no_round_fills_them(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round ends before it has written, so the weights are of no version at all."""
    monkeypatch.setattr(tempfile, "tempdir", str(rank.checkpoint))
    async with windlass.Controller(token=TOKEN, config=REFUSES_NAN) as controller:
        rank.engine_rank.sleep.is_enabled = True
        await asyncio.to_thread(rank.join, controller.url)
        await asyncio.to_thread(publish, weights(1), controller.url, 1)
        lose(rank)
        assert held_for(PORT) is None, "a request of a normal turn waits for the next version"
        await refuse_nan(controller.url, 2)
        held = await asyncio.to_thread(wait_until_held)
        assert held.cause is HoldCause.EMPTY
        assert "has no weights" in held.reason
        assert "two versions" not in held.reason
        await asyncio.to_thread(publish, weights(2), controller.url, 3)
        assert held_for(PORT) is None
    leave(rank)


async def test_server_that_sleeps_with_its_weights_waits_for_its_framework(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At level 1 the engine has a copy of its weights, and the framework can wake it without an update."""
    monkeypatch.setattr(tempfile, "tempdir", str(rank.checkpoint))
    async with windlass.Controller(token=TOKEN, config=REFUSES_NAN) as controller:
        rank.engine_rank.sleep.is_enabled = True
        await asyncio.to_thread(rank.join, controller.url)
        await asyncio.to_thread(publish, weights(1), controller.url, 1)
        sleep = rank.engine_rank.sleep
        sleep.asleep = frozenset({sleep.WEIGHTS})
    # The rank has noticed that the controller has ended.
    with pytest.raises(ProtocolError, match="may be of two versions"):
        await asyncio.to_thread(rank.capture, "http://127.0.0.1:1")
    assert held_for(PORT) is None
    sleep.asleep = frozenset()
    leave(rank)


async def test_server_says_that_its_weights_are_lost_after_an_earlier_round_left_it_asleep(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework wakes the engine from level 1 after the first failed round, and lets it sleep at level 2."""
    monkeypatch.setattr(tempfile, "tempdir", str(rank.checkpoint))
    async with windlass.Controller(token=TOKEN, config=REFUSES_NAN) as controller:
        sleep = rank.engine_rank.sleep
        sleep.is_enabled = True
        await asyncio.to_thread(rank.join, controller.url)
        await asyncio.to_thread(publish, weights(1), controller.url, 1)
        sleep.asleep = frozenset({sleep.WEIGHTS})
        await refuse_nan(controller.url, 2)
        sleep.asleep = frozenset()
        lose(rank)
        await refuse_nan(controller.url, 3)
        assert (await asyncio.to_thread(wait_until_held)).cause is HoldCause.EMPTY
    with pytest.raises(AuthenticationError):
        async with windlass.Controller(token="another secret") as other:
            await asyncio.to_thread(rank.join, other.url)
    # The rank has left the first fleet and has not joined the second, so no update is on its way.
    held = held_for(PORT)
    assert held is not None
    assert (held.cause, held.may_leave) == (HoldCause.EMPTY, True)
    leave(rank)


async def test_server_says_why_it_waits_while_it_cannot_resume(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(rank.checkpoint))
    async with windlass.Controller(token=TOKEN, config=IN_PLACE) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        rank.api.refuses_resume = "no answer"
        await asyncio.to_thread(publish, weights(1), controller.url, 1)
        held = await asyncio.to_thread(wait_until_held)
        assert held.cause is HoldCause.NOT_RESUMED
        assert "did not resume" in held.reason
        rank.api.refuses_resume = ""
        # The controller repeats the command.
        await asyncio.to_thread(wait_until, lambda: held_for(PORT) is None)
    leave(rank)


async def test_record_follows_what_the_held_engine_may_do(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop may be blocked later, and the framework may free mixed weights."""
    monkeypatch.setattr(tempfile, "tempdir", str(rank.checkpoint))
    sleep, gate = rank.engine_rank.sleep, rank.engine_rank.gate
    async with windlass.Controller(token=TOKEN, config=IN_PLACE) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        publishing = partial(publish, weights(1), controller.url, 1, deadline_s=5.0)
        rank.api.may_quiesce.clear()
        published = asyncio.create_task(asyncio.to_thread(publishing))
        assert await asyncio.to_thread(rank.api.asked.wait, 30)
    rank.api.may_quiesce.set()

    def seen() -> tuple[HoldCause, bool]:
        held = held_for(PORT)
        assert held is not None
        return held.cause, held.may_leave

    await asyncio.to_thread(wait_until_held)
    assert seen() == (HoldCause.MIXED, False)
    lose(rank)
    assert seen() == (HoldCause.EMPTY, True)
    with gate.held():
        assert seen() == (HoldCause.EMPTY, False)
    assert seen() == (HoldCause.EMPTY, True)
    blocked = threading.Thread(target=gate.block, args=("9.9", 30.0))
    blocked.start()
    await asyncio.to_thread(wait_until, lambda: seen() == (HoldCause.EMPTY, False))
    gate.end()
    await asyncio.to_thread(blocked.join, 30)
    assert seen() == (HoldCause.EMPTY, True)
    sleep.is_lost = False
    assert seen() == (HoldCause.MIXED, False)
    with pytest.raises(PeerTimeout):
        await published
    sleep.is_lost = True
    leave(rank)


async def test_copy_of_weights_is_refilled_after_the_weights_were_lost(rank: Rank) -> None:
    """The main loop finds the copy before the loss. In the round, the weights have values that are not the copy's."""
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        with torch.no_grad():
            rank.model.weight.copy_(torch.randn(rank.model.weight.shape))
        rank.model.register_buffer("copied", rank.model.weight.detach().clone())
        rank.engine_rank.captured.look()
        lose(rank)
        trainer = weights(9)
        await asyncio.to_thread(publish, trainer, controller.url, 1)
        assert rank.holds(trainer)
        assert torch.equal(rank.model.get_buffer("copied"), rank.model.weight)
    leave(rank)


async def test_rank_that_lost_its_weights_refuses_what_an_update_cannot_fill(rank: Rank) -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        lose(rank)
        rank.engine_rank.sleep.missed = "gate: is the maximum of a weight"
        with pytest.raises(RoundAborted, match="gate: is the maximum"):
            await asyncio.to_thread(publish, weights(9), controller.url, 1)
        assert not rank.engine_rank.may_serve
        rank.engine_rank.sleep.missed = ""
        memory = rank.model.weight.data
        rank.model.weight.data = memory.clone()
        with pytest.raises(RoundAborted, match="these tensors have moved"):
            await asyncio.to_thread(publish, weights(9), controller.url, 2)
        rank.model.weight.data = memory
        trainer = weights(9)
        await asyncio.to_thread(publish, trainer, controller.url, 3)
        assert rank.holds(trainer)
    leave(rank)


async def test_rank_refuses_to_keep_a_tensor_that_it_computes(rank: Rank) -> None:
    """Updates write float16 into a buffer, which has no values of the tensors that no trainer sends."""
    tensors = {name: torch.full((4, 6), 3.0, dtype=torch.float16) for name in ("a", "b")}
    save_file(tensors, rank.checkpoint / "model.safetensors")
    rank.model.weight.data.fill_(3.0)
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        trainer = weights(1)
        del trainer["b"]
        with pytest.raises(RoundAborted, match=r"keep: .* computes 'b' of engine/0"):
            await asyncio.to_thread(publish, trainer, controller.url, 1, keep=("b",))
        assert (rank.model.weight == 3.0).all()
    leave(rank)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
async def test_catch_up_copies_no_values_that_the_donor_has_rounded(
    rank: Rank, tmp_path: Path, stored: torch.dtype
) -> None:
    """The donor rounds a float32 parameter to the dtype of its checkpoint. The newcomer's checkpoint has float32."""
    folders = {name: tmp_path / name for name in ("donor", "newcomer")}
    for folder, dtype in zip(folders.values(), (stored, torch.float32), strict=True):
        folder.mkdir()
        tensors = {n: torch.zeros(4, 6, dtype=dtype) for n in ("a", "b")}
        save_file(tensors, folder / "model.safetensors")
    ranks = {name: Rank(folder, torch.float32) for name, folder in folders.items()}
    trainer = torch.nn.ParameterDict({n: t / 7 for n, t in weights(1).items()})
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(ranks["donor"].join, controller.url, name="donor")
        connect = partial(windlass.connect_trainer, controller=controller.url, token=TOKEN)
        with await asyncio.to_thread(connect, trainer) as client:
            await asyncio.to_thread(client.publish, 1, deadline_s=30)
            await asyncio.to_thread(ranks["newcomer"].join, controller.url, name="newcomer")
            wait = partial(controller.wait_for_version, 1, engines=["newcomer"])
            if stored is torch.float32:
                await wait(deadline_s=30)
            else:
                with pytest.raises(PeerTimeout):
                    await wait(deadline_s=3)
                await asyncio.to_thread(client.publish, 2, deadline_s=30)
            assert ranks["newcomer"].holds(trainer)
    for each in ranks.values():
        leave(each)


async def test_kept_tensor_is_not_rounded_to_the_dtype_of_the_checkpoint(rank: Rank) -> None:
    """The engine was started with random weights, which the checkpoint's dtype cannot represent."""
    rank.model = torch.nn.Linear(6, 8, bias=False, dtype=torch.float32)
    trainer = torch.nn.ParameterDict({"a": weights(1)["a"] / 7})
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        kept = rank.model.weight.data[4:].copy_(weights(1)["b"] / 7).clone()
        for version in range(2):
            trainer["a"].data += version
            await asyncio.to_thread(publish, trainer, controller.url, version, keep=("b",))
            assert torch.equal(rank.model.weight[4:], kept)
            assert torch.equal(rank.model.weight[:4], trainer["a"].bfloat16().float())
    leave(rank)


async def test_kept_tensor_is_saved_before_a_sleep(rank: Rank) -> None:
    """An update writes only `a`, so sleep must save the parameter that contains both tensors."""
    async with windlass.Controller(token=TOKEN) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        captured, held = rank.engine_rank.captured, held_by(rank.model)
        assert [*unfilled(captured, held.values(), rank.engine_rank.kept)] == []
        trainer = weights(1)
        del trainer["b"]
        await asyncio.to_thread(publish, trainer, controller.url, 1, keep=("b",))
        kept = rank.engine_rank.kept
        assert [holding.name for holding in unfilled(captured, held.values(), kept)] == ["weight"]
        start = rank.model.weight.data_ptr()
        stop = start + rank.model.weight.nbytes
        assert [*unfilled_ranges(captured, [(start, stop)], kept)] == [(start, start, stop)]
    leave(rank)


async def test_rank_that_lost_its_weights_keeps_the_tensors_that_sleep_has_saved(
    rank: Rank,
) -> None:
    """New trainers bind the engine again while it sleeps."""
    trainer = weights(1)
    kept = trainer.pop("b").detach()
    rank.engine_rank.sleep.is_enabled = True
    config = ControlConfig(deadlines=PhaseDeadlines(fleet_s=3.0))
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(rank.join, controller.url)
        rank.model.weight.data[4:] = kept
        await asyncio.to_thread(publish, trainer, controller.url, 1, keep=("b",))
        lose(rank)
        # The engine's sleep mode restores the tensors that it has saved.
        rank.model.weight.data[4:] = kept
        trainer["a"].data += 1
        await asyncio.to_thread(publish, trainer, controller.url, 2, keep=("b",))
        assert rank.engine_rank.may_serve
        assert torch.equal(rank.model.weight[:4], trainer["a"].to(torch.bfloat16))
        assert torch.equal(rank.model.weight[4:], kept.to(torch.bfloat16))
        lose(rank)
        other = weights(9)
        del other["a"]
        with pytest.raises(
            RoundAborted, match="'a' of engine/0 must have the values of one version"
        ):
            await asyncio.to_thread(publish, other, controller.url, 3, keep=("a",))
    leave(rank)


def lose(rank: Rank) -> None:
    """Change the values of the rank's weights to others, as a sleep does, and write its copy of them again."""
    rank.engine_rank.sleep.is_enabled = rank.engine_rank.sleep.is_lost = True
    with torch.no_grad():
        rank.model.weight.fill_(1234)
        for buffer in rank.model.buffers():
            buffer.copy_(buffer.clone())


def publish(
    trainer: torch.nn.ParameterDict,
    url: str,
    version: int,
    keep: Sequence[str] = (),
    deadline_s: float = 600.0,
) -> UpdateReport:
    with windlass.connect_trainer(trainer, controller=url, token=TOKEN, keep=keep) as client:
        return client.publish(version, deadline_s=deadline_s).result()


async def refuse_nan(url: str, version: int) -> None:
    """Let a trainer publish NaN, which its own rank refuses before it has written."""
    trainer = weights(1)
    with torch.no_grad():
        trainer["a"][0, 0] = torch.nan
    with pytest.raises(RoundAborted, match="NaN"):
        await asyncio.to_thread(publish, trainer, url, version)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, f"the record is {held_for(PORT)}"
        time.sleep(0.05)


def wait_until_held() -> HeldRecord:
    wait_until(lambda: held_for(PORT) is not None)
    held = held_for(PORT)
    assert held is not None
    return held


def leave(rank: Rank) -> None:
    """Leave the fleet, so that no thread outlives the test."""
    rank.engine_rank.leave(10.0)
