"""Deadlines of tens of thousands of simultaneous attempts."""

from __future__ import annotations

import asyncio

from windlass.rollout import SamplingParams
from windlass.rollout.messages import Work
from windlass.rollout.table import Deadlines, Group, Record

DEADLINE_S = 20.0


def record(number: int) -> Record:
    work = Work(sampling=SamplingParams(max_new_tokens=1))
    (made,) = Group.of(-1, [str(number)], work, None, lambda _: None).records
    return made


async def test_deadlines_pass_in_order_and_cancelled_ones_do_not() -> None:
    passed: list[int] = []
    last = asyncio.Event()

    def note(item: Record) -> None:
        passed.append(int(item.task_id))
        if item.task_id == "99":
            last.set()

    deadlines = Deadlines(0.05, note)
    records = [record(item) for item in range(100)]
    ends = [deadlines.start(each) for each in records]
    for each in records[:99:2]:
        deadlines.stop(each)
        deadlines.stop(each)
    assert not passed
    async with asyncio.timeout(DEADLINE_S):
        await last.wait()
    assert passed == [item for item in range(100) if item % 2]
    assert asyncio.get_running_loop().time() >= ends[99]
    last.clear()
    deadlines.start(record(99))
    async with asyncio.timeout(DEADLINE_S):
        await last.wait()
