"""A name belongs to a role, and to its process while that process may be alive."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from fake_agents import (
    FakeEngineRank,
    FakeTrainerRank,
    engine_manifest,
    fake_hello,
    trainer_manifest,
)
from fake_fleet import TOKEN, FakeFleet

from windlass.config import ControlConfig
from windlass.control.connect_messages import Hello, Welcome
from windlass.control.messages import CONTROLLER_FRAMES
from windlass.control.routes import status_of
from windlass.errors import ProtocolError
from windlass.net.access import Access, role_token
from windlass.net.messages import encode

WITHIN_S = 20.0
ENGINE_TOKEN = role_token(TOKEN, Access.ENGINE)


def squatter() -> Hello:
    manifest = engine_manifest("trainer/0", 2)
    return fake_hello(manifest, group="trainer", incarnation="an engine's")


async def test_an_engine_that_came_first_does_not_keep_the_trainers_name() -> None:
    async with FakeFleet() as rig:
        rank = FakeEngineRank("trainer/0", 2)
        early = await rig.connect(squatter(), rank, token=ENGINE_TOKEN)
        await rig.start({"a": 1})
        assert (await rig.publish(0)).engines == ("a",)
        assert isinstance(await asyncio.to_thread(early.ended.exception, WITHIN_S), ProtocolError)


async def test_an_engine_with_the_trainers_name_is_refused_without_trainers() -> None:
    async with FakeFleet() as rig:
        await rig.start({"a": 1})
        for name in list(rig.trainers):
            await asyncio.to_thread(rig.channels.pop(name).close)
        async with asyncio.timeout(WITHIN_S):
            while status_of(rig.coordinator)["trainers"]:  # noqa: ASYNC110 - asks for no more than that
                await asyncio.sleep(0.01)
        with pytest.raises(
            ProtocolError, match="must not be 'trainer', the name of the trainers' group"
        ):
            await rig.connect(squatter(), FakeEngineRank("trainer/0", 2), token=ENGINE_TOKEN)
        for index in range(rig.num_trainers):
            await rig.add_trainer(index, incarnation="second", job="second")
        assert (await rig.publish(0)).engines == ("a",)


@pytest.mark.parametrize("role", ["trainer", "engine"])
async def test_a_process_joins_when_its_hanging_predecessor_is_detected(role: str) -> None:
    """The predecessor hangs: its connection stays open, and it answers no ping."""
    if role == "trainer":
        manifest, rank = trainer_manifest("trainer/0", 0, 1), None
    else:
        manifest, rank = engine_manifest("a/0", 1), FakeEngineRank("a/0", 1)
    group = manifest.worker.partition("/")[0]
    async with FakeFleet(ControlConfig(heartbeat_s=1.0), num_trainers=1) as rig:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            hung = await http.ws_connect(rig.server.url + "/v1/agents", autoping=False)
            await hung.send_bytes(encode(fake_hello(manifest, group=group, incarnation="first")))
            assert isinstance(CONTROLLER_FRAMES.decode(await hung.receive_bytes()), Welcome)
            successor = fake_hello(manifest, group=group, incarnation="second")
            handler = rank or FakeTrainerRank("trainer/0", rig.fabric)
            async with asyncio.timeout(WITHIN_S):
                channel = await rig.connect(successor, handler)
            assert not channel.ended.done()
            hung._response.close()
