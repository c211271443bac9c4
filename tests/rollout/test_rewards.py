"""Reward functions in worker processes: a function that fails costs the rollout that it scores, and no other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from windlass.errors import ConfigError
from windlass.rollout import ProcessRewards, RewardError, RewardPool, Rollout

FUNCTION = """
    import os, signal, subprocess, sys, time
    from pathlib import Path

    kept = []

    class NoText(Exception):
        def __str__(self):
            return self.args[0]

    def reward(rollout):
        match rollout.metadata:
            case ["hang", file]:
                child = subprocess.Popen(["sleep", "600"])
                # A sandbox starts its program in a session of its own.
                sandbox = ["sh", "-c", "sleep 600 & wait"]
                other = subprocess.Popen(sandbox, start_new_session=True)
                inner = Path(f"/proc/{other.pid}/task/{other.pid}/children")
                while not inner.read_text().split():
                    time.sleep(0.01)
                pids = [os.getpid(), child.pid, other.pid, *inner.read_text().split()]
                Path(file + ".new").write_text(" ".join(map(str, pids)))
                os.rename(file + ".new", file)
                time.sleep(600)
            case "raise":
                raise ValueError("the answer has no number")
            case "memory":
                return len(bytearray(1 << 30))
            case "leak":
                kept.append(bytearray(150 << 20))
            case "signal":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(4)
            case "nan":
                return float("nan")
            case "none":
                return None
            case "print":
                print("frames and output must not mix", flush=True)
            case "token":
                return float("WINDLASS_TOKEN" in os.environ)
            case "text":
                raise NoText({"code": 3})
            case "surrogate":
                raise ValueError("\\ud800")
            case ["fork", way]:
                child = os.fork()
                if not child:
                    if way == "exit":
                        sys.exit(5)
                    if way == "raise":
                        raise ValueError("the child's own error")
                    return -1.0
                time.sleep(0.3)
                assert os.waitpid(child, 0)[1] >> 8 == {"exit": 5, "raise": 1, "return": 0}[way]
            case ["program"]:
                return subprocess.Popen(["sleep", "600"]).pid
            case ["sleep", seconds]:
                time.sleep(seconds)
            case ["pid", seconds]:
                time.sleep(seconds)
                return os.getpid()
        return sum(rollout.output_ids)
"""


def write(folder: Path, text: str = FUNCTION) -> str:
    file = folder / "reward.py"
    file.write_text(textwrap.dedent(text))
    return str(file)


def rollouts(metadata: Sequence[object]) -> list[Rollout]:
    return [
        Rollout(
            task_id=f"task-{number}",
            group_id=0,
            prompt_ids=(1, 2),
            output_ids=(10 * number, 10 * number + 1),
            logprobs=(-0.5, -0.25),
            versions=(3, 4),
            finish_reason="stop",
            engine="engine-a",
            worker="worker-0",
            attempts=1,
            metadata=each,
            finished_at=1.0,
            seconds=1.0,
        )
        for number, each in enumerate(metadata)
    ]


def expected(number: int) -> float:
    return 20.0 * number + 1


async def test_each_fault_costs_only_the_rollout_that_it_happens_to(tmp_path: Path) -> None:
    kinds: list[object] = ["fine", ["hang", str(tmp_path / "pids")], "raise", "memory", "signal"]
    kinds += ["exit", "sys.exit", "nan", "none", "print", "fine"]
    config = ProcessRewards(
        file=write(tmp_path), num_processes=2, deadline_s=2.0, memory_nbytes=400 << 20
    )
    async with RewardPool(config) as pool:
        found = await pool.score(rollouts(kinds))
        # The pool has replaced the processes that it had to end.
        assert await pool.score(rollouts(["fine"] * 8)) == tuple(map(expected, range(8)))
        counts = pool.counts
    for number in (0, 9, 10):
        assert found[number] == expected(number)
    errors = {n: str(each) for n, each in enumerate(found) if isinstance(each, RewardError)}
    assert errors == {
        1: "rollout task-1: no reward within 2 s",
        2: "rollout task-2: the reward function raised line 26: ValueError: the answer has no number",
        3: "rollout task-3: the reward function needs more memory than rewards.memory_nbytes: "
        "line 28: MemoryError: ",
        4: "rollout task-4: the reward process ended with SIGSEGV",
        5: "rollout task-5: the reward process ended with exit status 3",
        6: "rollout task-6: the reward function raised line 36: SystemExit: 4",
        7: "rollout task-7: the reward function raised ConfigError: reward must be finite, got nan",
        8: "rollout task-8: the reward function raised ConfigError: reward must be one number, got None",
    }
    assert (counts.scored, counts.failed) == (11, 8)
    assert counts.reasons == {
        "deadline": 1,
        "raised ValueError": 1,
        "memory": 1,
        "ended with SIGSEGV": 1,
        "ended with exit status 3": 1,
        "raised SystemExit": 1,
        "raised ConfigError": 2,
    }
    # The hanging function's program has ended too.
    await asyncio.to_thread(until_gone, tmp_path / "pids")


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def until_gone(file: Path) -> None:
    """Wait until the processes in a file have ended; a zombie counts as ended."""
    for pid in file.read_text().split():
        until(partial(has_ended, int(pid)))


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("way", ["exit", "raise", "return"])
async def test_forked_child_sends_no_reward_and_takes_no_rollout(way: str, tmp_path: Path) -> None:
    config = ProcessRewards(file=write(tmp_path), num_processes=1, deadline_s=30.0)
    slow: list[object] = [["sleep", 0.2]] * 4
    async with RewardPool(config) as pool:
        found = await pool.score(rollouts([["fork", way], *slow]))
    assert found == tuple(map(expected, range(5)))


ASYNC_FUNCTION = """
    import asyncio, os

    async def forever():
        await asyncio.sleep(600)

    event = asyncio.Event()
    background = []

    async def reward(rollout):
        match rollout.metadata:
            case "hang":
                await event.wait()
            case "raise":
                raise ValueError("the judge has no answer")
            case "background":
                # A client of a judge keeps its connection, and so its event loop, over many calls.
                background.append(asyncio.create_task(forever()))
            case "check":
                assert not background[0].done()
                assert background[0].get_loop() is asyncio.get_running_loop()
        await asyncio.sleep(0.01)
        return sum(rollout.output_ids)
"""


async def test_function_may_be_async(tmp_path: Path) -> None:
    config = ProcessRewards(file=write(tmp_path, ASYNC_FUNCTION), num_processes=1, deadline_s=2.0)
    async with RewardPool(config) as pool:
        found = await pool.score(rollouts(["background", "check", "raise", "check", "hang"]))
    assert (found[0], found[1], found[3]) == (expected(0), expected(1), expected(3))
    assert "raised line 15: ValueError: the judge has no answer" in str(found[2])
    assert str(found[4]) == "rollout task-4: no reward within 2 s"


ALARM_FUNCTION = """
    import signal, time

    def too_long(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)

    def reward(rollout):
        try:
            if rollout.metadata == "quick":
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                return sum(rollout.output_ids)
            time.sleep(0.6)
            return sum(rollout.output_ids)
        except TimeoutError:
            return 0.0
"""


async def test_alarm_of_an_earlier_rollout_changes_no_reward(tmp_path: Path) -> None:
    config = ProcessRewards(file=write(tmp_path, ALARM_FUNCTION), num_processes=1)
    async with RewardPool(config) as pool:
        found = await pool.score(rollouts(["quick", "slow", "quick", "slow"]))
        assert pool.counts.replaced == 0
    assert found == tuple(map(expected, range(4)))


async def test_error_without_a_valid_text_costs_only_its_rollout(tmp_path: Path) -> None:
    config = ProcessRewards(file=write(tmp_path), num_processes=1)
    async with RewardPool(config) as pool:
        found = await pool.score(rollouts(["text", "surrogate", "fine"]))
        assert pool.counts.replaced == 0
    assert str(found[0]).endswith("NoText: (no text: its __str__ raised TypeError)")
    assert str(found[1]).endswith("ValueError: ?")
    assert found[2] == expected(2)


async def test_process_that_dies_between_two_calls_costs_no_rollout(tmp_path: Path) -> None:
    config = ProcessRewards(file=write(tmp_path), num_processes=1)
    async with RewardPool(config) as pool:
        (pid,) = await pool.score(rollouts([["pid", 0.0]]))
        (program,) = await pool.score(rollouts([["program"]]))
        assert isinstance(pid, float)
        assert isinstance(program, float)
        os.kill(int(pid), signal.SIGKILL)
        # The pool ends the program at once. Later, another process group may have the number of this one.
        await asyncio.to_thread(until, partial(has_ended, int(program)))
        assert await pool.score(rollouts(["fine"] * 2)) == tuple(map(expected, range(2)))
        assert (pool.counts.failed, pool.counts.replaced) == (0, 1)


async def test_memory_that_earlier_rollouts_left_costs_no_rollout(tmp_path: Path) -> None:
    config = ProcessRewards(file=write(tmp_path), num_processes=1, memory_nbytes=400 << 20)
    async with RewardPool(config) as pool:
        found = await pool.score(rollouts(["leak"] * 6))
        assert found == tuple(map(expected, range(6)))
        assert pool.counts.replaced >= 2


async def test_killed_process_costs_the_rollout_that_it_scored(tmp_path: Path) -> None:
    config = ProcessRewards(file=write(tmp_path), num_processes=2)
    async with RewardPool(config) as pool:
        first = await pool.score(rollouts([["pid", 0.2]] * 2))
        pids = {int(each) for each in first if not isinstance(each, RewardError)}
        assert len(pids) == 2
        scoring = asyncio.create_task(pool.score(rollouts([["pid", 1.0]] * 2)))
        await asyncio.sleep(0.3)
        victim = min(pids)
        os.kill(victim, signal.SIGKILL)
        found = await scoring
        errors = [each for each in found if isinstance(each, RewardError)]
        assert len(errors) == 1
        assert str(errors[0]).endswith("the reward process ended with SIGKILL")
        assert {each for each in found if not isinstance(each, RewardError)} == pids - {victim}
        # An idle process that was killed costs one rollout; the next one gets a new process.
        assert await pool.score(rollouts(["fine"] * 4)) == tuple(map(expected, range(4)))


@pytest.mark.parametrize(
    "edited", ["def reward(rollout):\n    return -1.0\n", "def reward(rollo", None]
)
async def test_new_processes_run_the_file_as_it_was_at_the_start(
    edited: str | None, tmp_path: Path
) -> None:
    file = write(tmp_path)
    config = ProcessRewards(file=file, num_processes=1, deadline_s=30.0)
    async with RewardPool(config) as pool:
        assert await pool.score(rollouts(["fine"])) == (1.0,)
        if edited is None:
            (tmp_path / "reward.py").rename(tmp_path / "other.py")
        else:
            write(tmp_path, edited)
        found = await pool.score(rollouts(["exit", "raise", "fine"]))
    assert str(found[0]).endswith("the reward process ended with exit status 3")
    assert str(found[1]).endswith("raised line 26: ValueError: the answer has no number")
    assert found[2] == expected(2)


async def test_cancelled_call_ends_its_process_and_frees_its_place(tmp_path: Path) -> None:
    config = ProcessRewards(file=write(tmp_path), num_processes=1)
    async with RewardPool(config) as pool:
        scoring = asyncio.create_task(pool.score(rollouts([["hang", str(tmp_path / "pids")]])))
        await asyncio.to_thread(until, (tmp_path / "pids").exists)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        assert await pool.score(rollouts(["fine"] * 2)) == tuple(map(expected, range(2)))
    await asyncio.to_thread(until_gone, tmp_path / "pids")


async def test_reward_process_does_not_get_the_secrets_of_its_parent(tmp_path: Path) -> None:
    async with RewardPool(ProcessRewards(file=write(tmp_path), num_processes=1)) as pool:
        assert await pool.score(rollouts(["token"])) == (0.0,)


def test_reward_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from test_rewards import ProcessRewards, RewardPool, rollouts

            async def main():
                config = ProcessRewards(file={write(tmp_path)!r}, num_processes=2)
                async with RewardPool(config) as pool:
                    job = asyncio.create_task(pool.score(rollouts([["hang", {str(tmp_path / "pids")!r}]])))
                    found = await pool.score(rollouts([["pid", 0.1]]))
                    print(int(found[0]), flush=True)
                    await job

            asyncio.run(main())
            """
        )
    )
    with subprocess.Popen((sys.executable, str(script)), stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            idle = int(made.stdout.readline())
            until((tmp_path / "pids").exists)
        finally:
            made.kill()
    hanging, *programs = map(int, (tmp_path / "pids").read_text().split())
    try:
        until(lambda: has_ended(idle) and has_ended(hanging))
    finally:
        for program in programs:
            os.kill(program, signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ("def score(rollout): return 1.0", "reward", r"which has \['score'\], got 'reward'"),
        ("raise OSError('no data')", "reward", r"reward\.py': line 1: OSError: no data"),
        (
            "import os; os._exit(7)",
            "reward",
            r"rewards\.file .*: the reward process ended with exit",
        ),
        (
            "import time; time.sleep(60)",
            "reward",
            r"rewards\.file .*: the function was not imported within 3 s",
        ),
    ],
)
async def test_pool_with_a_wrong_function_does_not_open(
    text: str, name: str, error: str, tmp_path: Path
) -> None:
    # A busy machine may take seconds to start a process.
    deadline_s = 3.0 if "sleep" in text else 60.0
    config = ProcessRewards(
        file=write(tmp_path, text), function=name, num_processes=2, start_deadline_s=deadline_s
    )
    with pytest.raises((ConfigError, RewardError), match=error):
        async with RewardPool(config):
            pytest.fail("the pool opened")


async def test_settings_and_values_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.num_processes must be >= 1, got 0"):
        ProcessRewards(file="x.py", num_processes=0)
    with pytest.raises(ConfigError, match=r"rewards\.file must be a Python file, got '/nowhere'"):
        RewardPool(ProcessRewards(file="/nowhere"))
    async with RewardPool(ProcessRewards(file=write(tmp_path), num_processes=1)) as pool:
        with pytest.raises(ConfigError, match="metadata and value must be msgpack-plain"):
            await pool.score(rollouts([object()]))
        assert await pool.score(rollouts(["fine"])) == (1.0,)
