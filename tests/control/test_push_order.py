"""The controller carries out calls of several leaders in the declared order, not as they arrive."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.backends.push_leaders import PushOrder
from windlass.errors import RoundAborted


@settings(deadline=None)
@given(num_calls=st.lists(st.integers(0, 4), min_size=1, max_size=4), data=st.data())
def test_calls_run_in_the_declared_order_after_any_arrival(
    num_calls: list[int], data: st.DataObject
) -> None:
    declared = sorted((k, leader) for leader, n in enumerate(num_calls) for k in range(n))
    arrival = data.draw(st.permutations(declared))

    async def run() -> list[tuple[int, int]]:
        order = PushOrder(len(num_calls))
        carried_out: list[tuple[int, int]] = []
        left = list(num_calls)

        async def call(number: int, leader: int) -> None:
            async with order.turn(leader, number):
                carried_out.append((number, leader))
                await asyncio.sleep(0)
            left[leader] -= 1
            if left[leader] == 0:
                order.end(leader)

        for leader, n in enumerate(num_calls):
            if n == 0:
                order.end(leader)
        async with asyncio.timeout(10):
            tasks = []
            for number, leader in arrival:
                tasks.append(asyncio.create_task(call(number, leader)))
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        assert order.over
        return carried_out

    assert asyncio.run(run()) == declared


async def test_a_failure_releases_all_calls_that_wait_for_a_turn() -> None:
    order = PushOrder(3)

    async def call(leader: int) -> None:
        async with order.turn(leader, 0):
            raise AssertionError("it is not its turn")

    waiting = [asyncio.create_task(call(leader)) for leader in (2, 1)]
    await asyncio.sleep(0)
    order.fail("bucket 0 failed")
    for task in waiting:
        with pytest.raises(RoundAborted, match="bucket 0 failed"):
            await task


async def test_push_order_refuses_repeated_calls_late_calls_and_an_early_end() -> None:
    order = PushOrder(2)
    async with order.turn(0, 0):
        pass
    with pytest.raises(RoundAborted, match="call 0 of leader 0 was sent twice or too late"):
        async with order.turn(0, 0):
            pass

    async def late() -> None:
        async with order.turn(0, 1):
            pass

    waiting = asyncio.create_task(late())
    await asyncio.sleep(0)
    assert "stage 0 ended before its call 1" in order.end(0)
    with pytest.raises(RoundAborted, match="stage 0 ended before its call 1"):
        await waiting
