"""`RolloutCallback` with real engine processes: an update through its calls is complete, or changes no engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from flat_engine import flat_engine
from safetensors.numpy import save_file
from test_backends import DEADLINES, NUM_TRAINERS
from weight_fleet import TOKEN, Fleet
from weight_rank import shapes, truth

import windlass
from windlass.config import ControlConfig, P2pBackend, UpdateMode
from windlass.control.push_messages import CallbackAnswer, CallbackRequest, ContinueCall, PauseCall
from windlass.errors import AuthenticationError, PeerTimeout, RoundAborted, TransferFailed
from windlass.layout.dtypes import DType
from windlass.transfer.bindings import WireTensor

DEADLINE_S = 8.0


@asynccontextmanager
async def engines() -> AsyncIterator[tuple[Any, str]]:
    config = ControlConfig(mode=UpdateMode.IN_PLACE, backend=P2pBackend(), deadlines=DEADLINES)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        fleet = Fleet(controller.url, NUM_TRAINERS)
        try:
            fleet.add_engine("halves", 2)
            fleet.add_engine("whole", 1)
            await fleet.ready()
            yield fleet, controller.url
        finally:
            fleet.close()


def callback(url: str, leader: str = "leader") -> windlass.RolloutCallback:
    return windlass.RolloutCallback(url, TOKEN, leader=leader, deadline_s=DEADLINE_S)


def tensors(version: int, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(truth(version)[name]) for name in names}


def group(leader: windlass.RolloutCallback, name: str) -> windlass.WeightGroup:
    return windlass.WeightGroup(leader, name, bucket_nbytes=1 << 16, deadline_s=DEADLINE_S)


async def holds(fleet: Any, expected: tuple[int, str, bool]) -> None:
    """Wait until all ranks hold this: after an aborted round, a rank may still carry out a command of the round."""
    wanted, end = ([expected] * 2, [expected]), time.monotonic() + DEADLINE_S
    while (held := (await fleet.held("halves"), await fleet.held("whole"))) != wanted:
        assert time.monotonic() < end, held
        await asyncio.sleep(0.05)


def two_versions(url: str) -> None:
    with callback(url) as leader:
        leader.pause_generation()
        made = group(leader, "weights")
        for version in range(2):
            if version:
                leader.pause_generation()
            made.broadcast(tensors(version, "embed", "norm"))
            made.broadcast(tensors(version, "down", "gate"))
            leader.continue_generation(version)
        made.close()


async def test_broadcast_buckets_arrive_whole_and_a_group_serves_several_updates() -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(two_versions, url)
        await holds(fleet, (1, "1", False))


def opposite(url: str, version: int) -> None:
    """Let two leaders form their groups and send at the same time."""
    with callback(url, "a") as a, callback(url, "b") as b:
        a.pause_generation()
        b.pause_generation()

        def drive(leader: windlass.RolloutCallback, names: list[str]) -> None:
            made = group(leader, f"group-{leader.leader}")
            for name in names:
                made.broadcast(tensors(version, name))
            leader.continue_generation(version)
            made.close()

        with ThreadPoolExecutor(2) as pool:
            works = [
                pool.submit(drive, a, ["embed", "down"]),
                pool.submit(drive, b, ["gate", "norm"]),
            ]
            for work in works:
                work.result(60)


async def test_two_leaders_in_opposite_order_do_not_deadlock() -> None:
    async with engines() as (fleet, url):
        for version in range(3):
            await asyncio.to_thread(opposite, url, version)
            await holds(fleet, (version, str(version), False))


def fail_in_the_second_bucket(url: str, bucket: dict[str, torch.Tensor], says: str) -> None:
    with callback(url) as leader:
        leader.pause_generation()
        made = group(leader, "weights")
        made.broadcast(tensors(2, "embed", "norm"))
        began = time.monotonic()
        with pytest.raises((RoundAborted, TransferFailed), match=says):
            made.broadcast(bucket)
        assert time.monotonic() - began < DEADLINE_S
        with pytest.raises(RoundAborted, match="was not published"):
            leader.continue_generation(2)
        made.close()


async def test_a_failed_bucket_releases_its_leader_and_keeps_the_old_version() -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(two_versions, url)
        with pytest.raises(RoundAborted, match="must be > 1"):
            await asyncio.to_thread(two_versions, url)
        for bucket, says in (
            ({"down": torch.zeros(3, 3, dtype=torch.int32)}, "shape of 'down' must be"),
            ({"down": tensors(2, "down")["down"].float()}, "tensor 'down': only float32"),
            ({"up": torch.zeros(3, 3)}, "must receive a tensor of the engine's model, got 'up'"),
        ):
            await asyncio.to_thread(fail_in_the_second_bucket, url, bucket, says)
        await holds(fleet, (1, "1", False))


def incomplete(url: str) -> None:
    with callback(url) as leader:
        leader.pause_generation()
        made = group(leader, "weights")
        made.broadcast(tensors(0, "embed"))
        with pytest.raises(RoundAborted, match="3 tensors did not arrive"):
            leader.continue_generation(0)
        made.close()


async def test_an_update_that_lacks_tensors_changes_nothing() -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(incomplete, url)
        await holds(fleet, (-1, "untouched", False))


def tied(url: str, version: int, *buckets: dict[str, float]) -> None:
    with callback(url) as leader:
        leader.pause_generation()
        made = group(leader, "weights")
        try:
            for bucket in buckets:
                made.broadcast({name: torch.full((4, 3), value) for name, value in bucket.items()})
        finally:
            leader.continue_generation(version)
            made.close()


async def test_tied_tensors_must_arrive_with_equal_values() -> None:
    config = ControlConfig(deadlines=DEADLINES)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        like, aliases = {"embed": torch.zeros(4, 3)}, {"head": "embed"}

        def update() -> None:
            with flat_engine(controller.url, TOKEN, like, aliases=aliases) as held:
                for version, buckets in enumerate(
                    (
                        ({"head": 2.0},),
                        ({"embed": 3.0}, {"head": 3.0}),
                        ({"embed": 4.0, "head": 4.0},),
                    )
                ):
                    tied(controller.url, version, *buckets)
                    assert (held["embed"] == 2.0 + version).all()
                for buckets in (({"embed": 5.0}, {"head": 6.0}), ({"embed": 5.0, "head": 6.0},)):
                    with pytest.raises((RoundAborted, TransferFailed), match="was not published"):
                        tied(controller.url, 3, *buckets)
                    assert (held["embed"] == 4.0).all()

        await asyncio.to_thread(update)


def one_half_missing(url: str) -> None:
    with callback(url) as leader:
        leader.pause_generation()
        made = group(leader, "weights")
        began = time.monotonic()
        spec = (WireTensor("norm", DType.INT32, (24,)),)
        half = leader.update_weights_from_distributed("weights", spec, stamp="", deadline_s=1.0)
        # The call returns a future at once. The other half never comes.
        assert not half.done()
        with pytest.raises((RoundAborted, TimeoutError)):
            half.result(DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S
        with pytest.raises(RoundAborted):
            leader.continue_generation(0)
        made.close()


async def test_a_bucket_without_its_broadcast_ends_by_its_deadline() -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(one_half_missing, url)
        await holds(fleet, (-1, "untouched", False))
        await asyncio.to_thread(two_versions, url)
        await holds(fleet, (1, "1", False))


def refused_bucket(url: str) -> None:
    with callback(url) as leader:
        leader.pause_generation()
        made = group(leader, "weights")
        with pytest.raises(RoundAborted):
            leader.update_weights_from_disk("/nowhere").result(DEADLINE_S)
        began = time.monotonic()
        with pytest.raises(RoundAborted, match="the update has failed already"):
            made.broadcast(tensors(5, *shapes()))
        with pytest.raises(RoundAborted, match="the update has failed already"):
            group(leader, "other")
        assert time.monotonic() - began < DEADLINE_S / 2
        with pytest.raises(RoundAborted):
            leader.continue_generation(0)
        # No engine has received the refused bucket. Engines must not take it for a later one.
        leader.pause_generation()
        with pytest.raises(TransferFailed, match="is broken"):
            made.broadcast(tensors(0, *shapes()))
        specs = [WireTensor(name, DType.INT32, shape) for name, shape in shapes().items()]
        later = leader.update_weights_from_distributed("weights", specs, stamp="00" * 16)
        with pytest.raises(RoundAborted, match=r"belongs to another call|Connection closed"):
            later.result(DEADLINE_S)
        with pytest.raises(RoundAborted):
            leader.continue_generation(0)
        made.close()


async def test_a_refused_bucket_releases_its_leader_at_once() -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(refused_bucket, url)
        await holds(fleet, (-1, "untouched", False))
        await asyncio.to_thread(two_versions, url)
        await holds(fleet, (1, "1", False))


def from_disk(url: str, folder: Path) -> None:
    save_file(dict(list(truth(0).items())[:2]), folder / "model-1.safetensors")
    save_file(dict(list(truth(0).items())[2:]), folder / "model-2.safetensors")
    with callback(url) as leader:
        leader.pause_generation()
        leader.update_weights_from_disk(str(folder)).result(DEADLINE_S)
        leader.continue_generation(0)
        path = folder / "model-2.safetensors"
        path.write_bytes(path.read_bytes()[:-5])
        leader.pause_generation()
        with pytest.raises(RoundAborted, match="model-2"):
            leader.update_weights_from_disk(str(folder)).result(DEADLINE_S)
        with pytest.raises(RoundAborted):
            leader.continue_generation(1)


async def test_a_checkpoint_folder_is_read_by_boxes_and_a_torn_one_is_refused(
    tmp_path: Path,
) -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(from_disk, url, tmp_path)
        await holds(fleet, (0, "0", False))


def ask_for(leader: windlass.RolloutCallback, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        leader.engine_ranks()
        time.sleep(0.02)


def vanish(url: str) -> None:
    with callback(url) as leader:
        leader.pause_generation(session_s=0.5)
        with windlass.RolloutCallback(url, "wrong") as stranger, pytest.raises(AuthenticationError):
            stranger.pause_generation()
        # A leader that pauses before the end of the session would join the session and end with it.
        with pytest.raises(RoundAborted, match="no update is running"):
            ask_for(leader, DEADLINE_S)
    two_versions(url)


def test_a_call_that_ends_because_its_object_is_closed_says_so() -> None:
    url = "http://127.0.0.1:9"
    leader = windlass.RolloutCallback(url, TOKEN, deadline_s=60)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(leader.pause_generation)
        leader.close()
        with pytest.raises(
            PeerTimeout, match=f"PauseCall: RolloutCallback was closed before {url}"
        ):
            call.result(30)


async def test_leaders_that_vanish_block_engines_only_for_their_session() -> None:
    async with engines() as (fleet, url):
        await asyncio.to_thread(vanish, url)
        await holds(fleet, (1, "1", False))


LEASE_S = 3.0
PAUSES = """
import signal, sys, windlass
from windlass.trainers import callback
callback.LEASE_S = float(sys.argv[3])
windlass.RolloutCallback(sys.argv[1], sys.argv[2], leader="killed").pause_generation()
print("paused", flush=True)
signal.pause()
"""


def kill_one_of_two(url: str) -> None:
    command = [sys.executable, "-c", PAUSES, url, TOKEN, str(LEASE_S)]
    with (
        callback(url) as leader,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed,
    ):
        try:
            assert killed.stdout is not None
            assert killed.stdout.readline() == "paused\n"
            leader.pause_generation()
            # Both processes are alive, so the update outlives their leases.
            ask_for(leader, 2.5 * LEASE_S)
        finally:
            killed.kill()
        with pytest.raises(RoundAborted, match="killed has not reported for 3 s"):
            leader.continue_generation(0, deadline_s=6 * LEASE_S)
    two_versions(url)


async def test_the_death_of_a_leader_ends_its_update_after_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("windlass.trainers.callback.LEASE_S", LEASE_S)
    async with engines() as (fleet, url):
        await asyncio.to_thread(kill_one_of_two, url)
        await holds(fleet, (1, "1", False))


async def test_a_call_with_a_repeated_request_id_runs_once() -> None:
    async with engines() as (_, url):
        body = msgspec.msgpack.encode(CallbackRequest("one", "leader", PauseCall(60.0), 10.0))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask(data: bytes) -> CallbackAnswer:
                async with http.post(f"{url}/v1/callback", data=data) as answer:
                    return msgspec.msgpack.decode(await answer.read(), type=CallbackAnswer)

            # All requests succeed, so the call ran once: a second `continue` of a leader would find no update.
            assert await asyncio.gather(*(ask(body) for _ in range(5))) == [CallbackAnswer()] * 5
            end = msgspec.msgpack.encode(CallbackRequest("two", "leader", ContinueCall(0), 10.0))
            answers = [await ask(end) for _ in range(3)]
            assert "did not arrive" in answers[0].error
            assert answers == [answers[0]] * 3


def by_hand(url: str, version: int) -> None:
    with callback(url) as leader:
        leader.pause_generation()
        made = group(leader, "weights")
        made.broadcast(tensors(version, *shapes()))
        leader.continue_generation(version)
        made.close()


async def test_updates_by_hand_and_by_publish_take_turns() -> None:
    async with engines() as (fleet, url):
        fleet.add_trainers()
        for trainer in fleet.trainers:
            assert await trainer.read() == "ready"
        for version in (0, 2, 4):
            assert (await fleet.publish(version))[:2] == ("published", [])
            await holds(fleet, (version, str(version), False))
            await asyncio.to_thread(by_hand, url, version + 1)
            await holds(fleet, (version + 1, str(version + 1), False))
