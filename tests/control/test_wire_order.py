"""Each trainer rank starts with another destination, so no engine rank receives from all at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from fake_fleet import FakeFleet
from hypothesis import given
from hypothesis import strategies as st

import windlass
from windlass.control.messages import Command, Write
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.planning.order import staggered
from windlass.testing.resting_engine import RestingEngine
from windlass.testing.wrapped_transport import WrappedTransport
from windlass.transfer import sender
from windlass.transfer.base import ParameterMemory
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.registry import create_transport, parse_transport

TOKEN = "a-token"
ROW_NBYTES = 1 << 16
ROWS_PER_TRAINER = 8
LINK_BYTES_PER_S = 1 << 20
MAX_RATIO = 1.2


def rows_of(orders: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the destinations of each turn, one per source."""
    return list(zip(*orders.values(), strict=True))


@given(
    st.dictionaries(
        st.sampled_from([f"trainer/{i}" for i in range(9)]),
        st.lists(st.sampled_from([f"e/{i}" for i in range(9)]), unique=True),
    )
)
def test_each_source_keeps_its_destinations_and_the_first_turn_is_balanced(
    links: dict[str, list[str]],
) -> None:
    orders = staggered(links)
    assert {s: sorted(order) for s, order in orders.items()} == {
        s: sorted(names) for s, names in links.items()
    }
    whole = {s: order for s, order in orders.items() if len(order) == 9}
    first = Counter(order[0] for order in whole.values())
    if len(whole) == len(orders):
        assert max(first.values(), default=0) <= 1


@pytest.mark.parametrize("num_trainers", [2, 4, 8])
@pytest.mark.parametrize("engines", [1, 2])
async def test_ranks_that_the_coordinator_bound_write_in_a_latin_square(
    num_trainers: int, engines: int
) -> None:
    """When all trainers wrote to one engine rank first, the wire took twice as long on 2 + 2 GPUs."""
    written: dict[str, tuple[str, ...]] = {}

    def note(worker: str, command: Command) -> None:
        if isinstance(command, Write):
            written[worker] = command.destinations

    # Every rank announces in its own thread.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * num_trainers + 8))
    names = [f"engine-{index}" for index in range(engines)]
    async with FakeFleet(num_trainers=num_trainers) as fleet:
        for index in range(num_trainers):
            await fleet.add_trainer(index, on_command=partial(note, f"trainer/{index}"))
        for name in names:
            await fleet.add_engine(name, ranks=num_trainers)
        await fleet.coordinator.members.wait_for_fleet(
            num_trainers=num_trainers, engines=tuple(names), deadline_s=20
        )
        assert (await fleet.publish(0)).digest_ok
        assert len(written) == num_trainers
        check_latin(written)
        # The controller binds a late engine alone and adds it to the order of every trainer.
        await fleet.add_engine("late", ranks=num_trainers)
        await fleet.coordinator.members.wait_for_fleet(
            num_trainers=num_trainers, engines=(*names, "late"), deadline_s=20
        )
        assert (await fleet.publish(1)).digest_ok
        check_latin(written)


def check_latin(written: dict[str, tuple[str, ...]]) -> None:
    """Check that every turn and every trainer rank has each destination at most once."""
    for turn in rows_of(written):
        assert len(set(turn)) == len(turn), written
    assert len({frozenset(order) for order in written.values()}) == 1


class SharedLinks:
    """Links of limited rate, one per process. Each carries one write at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[str, threading.Lock] = {}

    def of(self, name: str) -> threading.Lock:
        with self._lock:
            return self._links.setdefault(name, threading.Lock())


class LimitedLink(WrappedTransport):
    """Transport of one rank. A write occupies its own link and then the link of the peer."""

    def __init__(self, inner: OneSidedTransport, own: str, links: SharedLinks) -> None:
        super().__init__(inner)
        self._own, self._links = own, links

    def write(self, batch: WriteBatch, *, deadline_s: float) -> None:
        with self._links.of(self._own), self._links.of(str(batch.regions[0].address)):
            time.sleep(int(batch.nbytes.sum()) / LINK_BYTES_PER_S)
            super().write(batch, deadline_s=deadline_s)


def manifest(worker: str, role: Role, first: int, stop: int, num_rows: int) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=(stop - first) * ROW_NBYTES, dtype=DType.UINT8)
    box = Box((first, 0), (stop - first, ROW_NBYTES))
    builder.add_shard("w", (num_rows, ROW_NBYTES), box, "w")
    return builder.build()


@pytest.mark.parametrize("num", [2, 4])
async def test_receivers_get_their_bytes_at_the_speed_of_their_links(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links of 1 MiB/s are far slower than this machine, so the order alone decides the time.

    Kernels that store into peers write one link after another. Threads of other transports do so
    beyond 16 links.
    """
    monkeypatch.setattr(sender, "LINKS_AT_ONCE", 1)
    num_rows, links = num * ROWS_PER_TRAINER, SharedLinks()
    values = np.arange(num_rows * ROW_NBYTES // 8, dtype=np.uint64).view(np.uint8)
    served = [np.zeros(num_rows * ROW_NBYTES, np.uint8) for _ in range(num)]

    async with windlass.Controller(token=TOKEN) as controller:
        url = controller.url

        def link(name: str) -> LimitedLink:
            return LimitedLink(create_transport(parse_transport("cma"), towards=url), name, links)

        def connect_engine(index: int) -> EngineClient:
            transport, memory = link(f"engine/{index}"), served[index]
            region = transport.register(memory.ctypes.data, memory.nbytes)
            return EngineClient(
                EngineWeights(
                    manifest=manifest(f"e/{index}", Role.ENGINE, 0, num_rows, num_rows),
                    addresses=[memory.ctypes.data],
                    regions=[region],
                ),
                transport=transport,
                hooks=RestingEngine(),
                controller=url,
                token=TOKEN,
                url="http://engine",
                world_size=num,
            )

        def connect_trainer(index: int) -> windlass.TrainerClient:
            first, stop = index * ROWS_PER_TRAINER, (index + 1) * ROWS_PER_TRAINER
            mine = values[first * ROW_NBYTES : stop * ROW_NBYTES]
            memory = ParameterMemory(mine.ctypes.data, mine.nbytes)
            return windlass.TrainerClient(
                windlass.TrainerWeights(
                    manifest=manifest(f"trainer/{index}", Role.TRAINER, first, stop, num_rows),
                    parameters=lambda: [memory],
                ),
                transport=link(f"trainer/{index}"),
                controller=url,
                token=TOKEN,
                world_size=num,
                job="one start",
            )

        with ExitStack() as stack:
            for index in range(num):
                client = await asyncio.to_thread(connect_engine, index)
                stack.callback(client.close)
            trainers = [await asyncio.to_thread(connect_trainer, i) for i in range(num)]
            for trainer in trainers:
                stack.callback(trainer.close)
            done = await asyncio.gather(
                *(asyncio.to_thread(partial(t.publish, 0, deadline_s=60)) for t in trainers)
            )
            await asyncio.to_thread(stack.close)
    reports = [update.result() for update in done]
    assert all(report.digest_ok for report in reports)
    assert all(np.array_equal(memory, values) for memory in served)
    at_link_speed_s = num_rows * ROW_NBYTES / LINK_BYTES_PER_S
    assert reports[0].phase_s["write"] < MAX_RATIO * at_link_speed_s
