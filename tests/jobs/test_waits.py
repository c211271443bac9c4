"""Jobs that lose an engine, a group or a workflow recover, or end with the reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from launched_jobs import RECIPE, launched, write


@pytest.mark.parametrize(
    ("num_engines", "groups"),
    [(1, 16), pytest.param(2, 4, marks=pytest.mark.long)],
    ids=["one", "two_together"],
)
def test_engines_that_die_while_the_trainer_waits_get_its_version_again(
    tmp_path: Path, num_engines: int, groups: int
) -> None:
    config = write(
        tmp_path,
        groups=groups,
        num_engines=num_engines,
        rollout="batch_deadline_s = 40.0",
        top="shutdown_s = 5.0",
    )
    with launched(config) as job:
        job.read_until("step 1:")
        for number in range(num_engines):
            (pid,) = job.children(f"engine-{number}")
            os.kill(pid, signal.SIGKILL)
        assert job.end() == 0, job.text
    assert "no engine serves version 1" in job.text
    assert "done: 3 steps, version 3 published" in job.text


WORKER = """
import asyncio, sys
from windlass.rollout import run_rollout_worker, Reject
async def answer(context):
    await context.generate((1, 2, context.arguments % 60))
    return {"reward": 1.0}
async def raises(context):
    await context.generate((1, 2, context.arguments % 60))
    return {"reward": {}["score"]}
async def too_long(context):
    await context.generate(tuple(range(1, 31)))
async def rejects(context):
    await context.generate((1, 2, context.arguments % 60))
    raise Reject("too short")
async def refused_at_four(context):
    if context.arguments == 3:
        await asyncio.sleep(1.0)
        await context.generate(tuple(range(1, 31)))
    return await answer(context)
known = (answer, raises, too_long, rejects, refused_at_four)
sys.exit(run_rollout_worker({each.__name__: each for each in known}))
"""
TURNS = """
import itertools
from windlass.jobs import Recipe, Task
from windlass.rollout import TrainingSample
class R(Recipe):
    def tasks(self):
        for n in TASKS:
            yield Task(workflow="NAME", arguments=n)
    def rewards(self, group):
        return [r.value["reward"] for r in group.rollouts]
    def samples(self, group):
        return [
            TrainingSample(
                prompt_ids=t.prompt_ids, output_ids=t.output.output_ids, logprobs=t.output.logprobs,
                versions=t.output.versions, reward=r.value["reward"], group_id=group.group_id, engine=r.engine,
            )
            for r in group.rollouts for t in r.turns
        ]
"""


def of_workflow(name: str, tasks: str = "itertools.count()") -> str:
    return TURNS.replace("NAME", name).replace("TASKS", tasks)


@pytest.mark.long
def test_a_job_ends_successfully_although_its_last_group_failed(tmp_path: Path) -> None:
    recipe = of_workflow("refused_at_four", "range(4)")
    config = write(
        tmp_path,
        recipe=recipe,
        worker=WORKER,
        groups=1,
        steps=9,
        rollout="batch_deadline_s = 60.0",
    )
    with launched(config) as job:
        assert job.end() == 0, job.text
    assert "the recipe's tasks ended after 3 steps" in job.text
    assert "done: 3 steps, version 3 published" in job.text


@pytest.mark.parametrize(
    ("workflow", "reason", "tracebacks"),
    [
        pytest.param(
            "fien",
            "workflow 'fien'; registered workflows: ['answer', 'raises', 'refused_at_four', ",
            0,
            marks=pytest.mark.long,
        ),
        # The newest failure may be an attempt that is tried again, so its reason may lack `max_same_errors`.
        ("raises", "worker worker-0: KeyError: 'score'", 3),
        pytest.param("too_long", "refused: engine engine-0 (", 0, marks=pytest.mark.long),
    ],
)
def test_a_failure_that_repeats_ends_the_job_with_its_reason(
    tmp_path: Path, workflow: str, reason: str, tracebacks: int
) -> None:
    config = write(
        tmp_path,
        recipe=of_workflow(workflow),
        worker=WORKER,
        rollout="batch_deadline_s = 80.0",
    )
    with launched(config) as job:
        assert job.end() == 2, job.text
    assert reason in job.error, job.text
    assert "batch_deadline_s" not in job.text
    log = (tmp_path / "out" / "logs" / "worker-0.log").read_text()
    assert log.count("Traceback") <= tracebacks
    assert job.text.count("WARNING") < 10


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more", "count"),
    [
        pytest.param("rejects", "", "rejected ", marks=pytest.mark.long),
        ("answer", "    def samples(self, group):\n        return []\n", "declined "),
    ],
    ids=["rejected", "declined"],
)
def test_a_batch_that_times_out_counts_its_rollouts_in_the_error(
    tmp_path: Path, name: str, more: str, count: str
) -> None:
    recipe = of_workflow(name) + more
    config = write(tmp_path, recipe=recipe, worker=WORKER, rollout="batch_deadline_s = 3.0")
    with launched(config) as job:
        assert job.end() == 2, job.text
    assert "no batch within 3 s; a batch needs 2 groups; scored: 0" in job.error, job.text
    assert count in job.error
    assert f"{count}0" not in job.error
    # A rollout that was rejected too often fails, and this failure then has the newest reason.
    assert ("too short" in job.error) is (name == "rejects")


SANDBOX = """
import asyncio, os, sys
from pathlib import Path
from windlass.rollout import run_rollout_worker
async def sandbox(context):
    here = Path(__file__).parent / f"{context.task_id}-{context.attempt}"
    here.with_suffix(".opened").touch()
    try:
        await context.generate((1, 2, context.arguments % 60))
        await asyncio.sleep(0.2 if context.arguments < 2 else 100)
        return {"reward": 1.0}
    finally:
        await asyncio.sleep(1.0)
        here.with_suffix(".closed").touch()
sys.exit(run_rollout_worker({"sandbox": sandbox}))
"""


@pytest.mark.parametrize(
    ("steps", "status"), [(1, 0), pytest.param(2, 130, marks=pytest.mark.long)]
)
def test_sandboxes_are_closed_when_a_job_ends(tmp_path: Path, steps: int, status: int) -> None:
    config = write(
        tmp_path,
        recipe=of_workflow("sandbox"),
        worker=SANDBOX,
        steps=steps,
        top="shutdown_s = 20.0",
    )
    with launched(config) as job:
        if status:
            job.read_until("step 1:")
            job.process.send_signal(signal.SIGINT)
        assert job.end() == status, job.text
    opened, closed = (len(list(tmp_path.glob(f"*.{what}"))) for what in ("opened", "closed"))
    assert opened > 4
    assert closed == opened


STALLS = RECIPE.replace(
    "            yield", "            time.sleep(100 if n == 5 else 0)\n            yield"
)


@pytest.mark.long
def test_sigint_ends_a_job_whose_tasks_wait_for_data(tmp_path: Path) -> None:
    config = write(tmp_path, recipe=STALLS, steps=9, top="shutdown_s = 5.0")
    with launched(config) as job:
        line = job.read_until("the job has waited 15 s for the batch of step 3")
        assert "the recipe's tasks() has yielded nothing for " in line
        assert "which needs 2 groups; scored: 1" in line
        job.process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        assert job.end() == 130, job.text
        assert time.monotonic() - began_s < 12
    assert "step 2:" in job.text


@pytest.mark.long
def test_the_error_of_a_batch_without_tasks_names_the_reason(tmp_path: Path) -> None:
    with launched(write(tmp_path, recipe=STALLS, rollout="batch_deadline_s = 4.0")) as job:
        assert job.end() == 2, job.text
    assert "no batch within 4 s; a batch needs 2 groups; scored: 1" in job.error
    assert "; the recipe's tasks() has yielded nothing for " in job.error


EXITS = (
    RECIPE
    + """
    async def ended(self, summary):
        raise SystemExit(3)
"""
)


@pytest.mark.long
def test_sys_exit_in_the_last_hook_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    with launched(write(tmp_path, recipe=EXITS, steps=1)) as job:
        assert job.end() == 2, job.text
    assert job.error.endswith("recipe: ended raised SystemExit: 3\n")
    assert "is closed" not in job.text


BLOCKS_THEN_HANGS = (
    RECIPE.replace("import itertools", "import asyncio, itertools")
    + """
    async def before_step(self, step, samples):
        time.sleep(8)
        await asyncio.sleep(1000)
"""
)


@pytest.mark.long
def test_a_blocking_hook_is_named_and_sigint_ends_the_job(
    tmp_path: Path,
) -> None:
    with launched(write(tmp_path, recipe=BLOCKS_THEN_HANGS, top="shutdown_s = 5.0")) as job:
        said = job.read_until("something has blocked the event loop of the controller for 5 s")
        assert "in before_step: time.sleep(8) <- " in said
        job.read_until(" s for the recipe's before_step of step 0")
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130, job.text


HANGS_IN_HOOK = (
    RECIPE.replace("import itertools", "import asyncio, itertools")
    + """
    async def {hook}(self, *given):
        try:
            await asyncio.sleep(1000)
        finally:
            print("{hook} is cancelled", flush=True)
"""
)


@pytest.mark.parametrize("hook", ["before_step", "ended"])
def test_a_hook_that_exceeds_its_deadline_ends_the_job_with_its_name(
    tmp_path: Path, hook: str
) -> None:
    config = write(tmp_path, recipe=HANGS_IN_HOOK.replace("{hook}", hook), steps=1)
    config.write_text(config.read_text().replace("[recipe]", "[recipe]\nhook_deadline_s = 3.0"))
    with launched(config) as job:
        assert job.end() == 2, job.text
    where = "before_step of step 0" if hook == "before_step" else hook
    assert f"recipe: {where} did not end within 3 s; raise recipe.hook_deadline_s" in job.error
    assert f"{hook} is cancelled" in job.text


def test_two_jobs_cannot_run_in_one_output_folder(tmp_path: Path) -> None:
    config = write(tmp_path, top='resume = "auto"')
    with launched(config) as first:
        first.read_until("controller http")
        with launched(config) as second:
            assert second.end() == 2, second.text
        assert "output_dir must be a folder that no running job uses, got" in second.error
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 143, first.text
    with launched(config) as third:
        third.read_until("controller http")
