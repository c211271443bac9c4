"""One update over several transports: each link uses the fastest transport of both its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from needs import need_transport

import windlass
from windlass.control import client
from windlass.control.report import LinkWire, RoundOutcome, UpdateReport
from windlass.control.routes import status_of
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.observability.speed_of_light import SpeedOfLight
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.arena import Arena
from windlass.transfer.base import ParameterMemory
from windlass.transports.auto import AutoConfig
from windlass.transports.base import OneSidedTransport
from windlass.transports.registry import create_transport

TOKEN = "t" * 32
NBYTES = 4096
DEADLINE_S = 30.0


def manifest(worker: str, role: Role) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=NBYTES, dtype=DType.FLOAT32)
    builder.add_shard("w", (NBYTES // 4,), Box((0,), (NBYTES // 4,)), "w")
    return builder.build()


def opened(names: Sequence[str]) -> tuple[OneSidedTransport, Arena]:
    transport = create_transport(AutoConfig(offers=tuple(names)))
    return transport, Arena(transport, NBYTES)


def engine_client(url: str, name: str, names: Sequence[str], undo: ExitStack) -> Arena:
    transport, arena = opened(names)
    client = windlass.EngineClient(
        windlass.EngineWeights(
            manifest=manifest(f"{name}/0", Role.ENGINE),
            addresses=[arena.address],
            regions=[arena.region],
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=url,
        token=TOKEN,
        url="http://127.0.0.1:9",
    )
    undo.callback(client.close)
    undo.callback(arena.close)
    return arena


def publish(url: str, names: Sequence[str], undo: ExitStack) -> UpdateReport:
    transport, arena = opened(names)
    arena.bytes[:] = np.arange(NBYTES) % 251
    memory = (ParameterMemory(arena.address, NBYTES),)
    client = TrainerClient(
        TrainerWeights(
            manifest=manifest("trainer/0", Role.TRAINER),
            parameters=lambda: memory,
        ),
        transport=transport,
        controller=url,
        token=TOKEN,
        registered=[arena.region],
    )
    undo.callback(client.close)
    undo.callback(arena.close)
    return client.publish(0, deadline_s=DEADLINE_S).result()


def found_s(links: Sequence[LinkWire], destination: str) -> float:
    (took,) = (link.wire_s for link in links if link.destination == destination)
    return took


async def test_links_take_the_fastest_transport_within_and_between_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`far` reports another host. `network` is on this host and has only mooncake."""
    need_transport("mooncake")
    both = ("cma", "mooncake")
    with ExitStack() as undo:
        async with windlass.Controller(token=TOKEN) as controller:
            url = controller.url
            start = asyncio.to_thread
            near = await start(engine_client, url, "near", both, undo)
            network = await start(engine_client, url, "network", ("mooncake",), undo)
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(client, "host_identity", lambda: "another host")
                far = await start(engine_client, url, "far", both, undo)
            report = await start(publish, url, both, undo)
            assert report.outcome is RoundOutcome.PUBLISHED
            assert set(report.engines) == {"near", "network", "far"}
            for arena in (near, network, far):
                assert (arena.bytes == np.arange(NBYTES) % 251).all()
            assert report.transports == {"cma": 1, "mooncake": 2}
            links = status_of(controller.coordinator)["links"]
            assert isinstance(links, list)
            found = {link["destination"]: (link["transport"], link["reason"]) for link in links}
            assert {name: taken for name, (taken, _) in found.items()} == {
                "near/0": "cma", "network/0": "mooncake", "far/0": "mooncake",
            }  # fmt: skip
            assert all(link["nbytes"] == NBYTES for link in links)
            ceilings = {link["destination"]: link["ceiling_gbps"] for link in links}
            assert ceilings == {"near/0": 6.0, "network/0": 1.2, "far/0": 1.2}
            assert {name: (w.num_links, w.nbytes) for name, w in report.wire.items()} == {
                "cma": (1, NBYTES), "mooncake": (2, 2 * NBYTES),
            }  # fmt: skip
            assert sum(wire.nbytes for wire in report.wire.values()) == report.nbytes
            named = [link for wire in report.wire.values() for link in wire.slowest]
            assert all(0 < link.wire_s <= report.wire_s for link in named)
            assert {(n.destination, n.wire_s, n.gbps) for n in named} == {
                (link["destination"], link["wire_s"], link["gbps"]) for link in links
            }
            took = [link["wire_s"] for link in links]
            assert took == sorted(took, reverse=True)
            assert f"trainer/0 -> near/0 {1e3 * found_s(named, 'near/0'):.2f} ms" in (
                SpeedOfLight(report, 1.0, 1).text()
            )
            assert found["near/0"][1].startswith("one host: 6 GB/s at best, faster than mooncake")
            assert found["far/0"][1].startswith(
                "two hosts: 1.2 GB/s at best, the only usable transport"
            )
            await start(undo.close)


async def test_an_engine_that_no_trainer_reaches_is_refused_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as undo:
        async with windlass.Controller(token=TOKEN) as controller:
            start = asyncio.to_thread
            await start(engine_client, controller.url, "near", ("cma",), undo)
            await start(engine_client, controller.url, "other", ("shm",), undo)
            report = await start(publish, controller.url, ("cma",), undo)
            assert report.engines == ("near",)
            assert (
                "trainer/0 cannot write to other/0: transport must be available at both"
                in caplog.text
            )
            await start(undo.close)
