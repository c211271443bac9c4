"""Jobs with real processes: values that a recipe returns, continuing after a signal, and restarts."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_job import EXAMPLE, launch, start, write_job

from windlass.jobs.audit import AUDIT, read_audit
from windlass.net.journal_file import read_entries
from windlass.rollout.journal import Entry, PersistedState

pytestmark = pytest.mark.timeout(600)

COUNTING = """
    import itertools
    import sys
    import torch
    from windlass.jobs import Recipe, Task
    from windlass.rollout import SamplingParams

    def print(*values, flush):
        # One write: `load` prints in another thread than the other methods.
        sys.stdout.write(" ".join(map(str, values)) + "\\n")
        sys.stdout.flush()

    async def two_turns(context):
        first = await context.generate((1, 2, context.arguments))
        await context.generate((*first.prompt_ids, *first.output.output_ids, 9))
        return {"first": first.output.output_ids[0]}

    class R(Recipe):
        number = 0

        def started(self, config, controller, scheduler):
            self.controller = controller

        def workflows(self):
            return {"two_turns": two_turns}

        def tasks(self):
            while self.number < 24:
                self.number += 1
                yield Task(workflow="two_turns", arguments=self.number, metadata=self.number)

        def state(self):
            return {"number": self.number}

        def load(self, state):
            print("LOAD", state, flush=True)
            self.number = state["number"]

        def rewards(self, group):
            return torch.tensor([rollout.value["first"] % 2 == 0 for rollout in group.rollouts])

        async def before_step(self, step, samples):
            asked = sorted({s.prompt_ids[2] for s in samples})
            print("TRAIN", asked, {len(s.output_ids) for s in samples}, len(samples), flush=True)

        async def evaluate(self):
            async with self.controller.evaluation() as evaluation:
                greedy = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
                handles = [evaluation.submit((3, 4, n), greedy) for n in range(4)]
                answers = await evaluation.wait(handles, deadline_s=30)
            return {version for answer in answers for version in answer.versions}

        async def after_step(self, step, result):
            print("AFTER", step, sorted(result.metrics), await self.evaluate(), flush=True)

        async def ended(self, summary):
            print("ENDED", summary.steps, summary.version, await self.evaluate(), flush=True)
"""


PADDED = """
import sys
sys.argv[0] = {example!r}
exec(compile(open({example!r}).read().partition("if __name__")[0], "trainer.py", "exec"))

def loss(model, groups):
    samples = [sample for group in groups for sample in group]
    longest = max(len(s.prompt_ids + s.output_ids) for s in samples)
    tokens, trained = torch.zeros(len(samples), longest, dtype=torch.long), torch.zeros(len(samples), longest)
    for row, s in enumerate(samples):
        tokens[row, : len(s.prompt_ids + s.output_ids)] = torch.tensor(s.prompt_ids + s.output_ids)
        trained[row, len(s.prompt_ids) : len(s.prompt_ids + s.output_ids)] = torch.tensor(s.loss_mask).float()
    chosen = model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    rewards = torch.tensor([s.reward for s in samples])
    return -(rewards[:, None] * chosen * trained[:, 1:]).sum() / trained.sum()

torch.set_num_threads(1)
run_train_worker(FsdpEngine(model=build_model, loss=loss, transport=os.environ["WINDLASS_TRANSPORT"],
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2)))
"""


def lines(printed: str, start: str) -> list[str]:
    return [
        line.removeprefix(start).strip() for line in printed.splitlines() if line.startswith(start)
    ]


def test_the_same_command_continues_a_stopped_job(tmp_path: Path) -> None:
    """Check a recipe with workflows, rewards in a boolean tensor, a state and an evaluation; the last step has a checkpoint."""
    top = 'steps = 9\nresume = "auto"'
    script = tmp_path / "padded.py"
    script.write_text(PADDED.format(example=str(EXAMPLE / "trainer.py")))
    saving = "save_every = 2\nkeep = 2"
    job = write_job(tmp_path, COUNTING, top=top, trainer=saving, script=script)
    first = ""
    with start(job) as (process, output):
        for line in output:
            first += line
            if line.startswith("AFTER 4"):
                process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 128 + signal.SIGTERM, first
    stopped_at = len(lines(first, "step "))
    assert 5 <= stopped_at < 9
    # Two groups of two rollouts make 4 samples. Each has two turns of 4 tokens, and the token that the second prompt adds.
    assert {line.partition("]")[2] for line in lines(first, "TRAIN ")} == {" {9} 4"}
    assert lines(first, "AFTER ")[:2] == [
        "0 ['grad_norm', 'logprob_difference', 'loss'] {1}",
        "1 ['grad_norm', 'loss'] {2}",
    ]
    # The signal saves a checkpoint of the last step.
    saved = stopped_at
    kept = [str(saved - 2 + saved % 2), str(saved)]
    assert sorted(os.listdir(tmp_path / "out/checkpoints"), key=int) == kept
    found = re.fullmatch(
        rf"to continue after step {saved} from (.*): run the same command", first.splitlines()[-1]
    )
    assert found
    assert Path(found[1]).resolve() == (tmp_path / f"out/checkpoints/{saved}").resolve()

    status, second = launch(job)
    assert status == 0, second
    assert f"continues from {tmp_path}/out/checkpoints/{saved}, after {saved} steps" in second
    assert lines(second, "LOAD ")
    assert len(lines(second, "step ")) == 9 - saved
    assert lines(second, "ENDED ") == ["9 9 {9}"]
    # The second run repeats only the prompts that the first run drew without training on them.
    before = [n for line in lines(first, "TRAIN ")[:saved] for n in numbers(line)]
    after = [n for line in lines(second, "TRAIN ") for n in numbers(line)]
    assert sorted(before + after) == sorted({*before, *after})
    assert len(before + after) == 18
    assert {*before, *after} <= {*range(1, 25)}
    of_steps = [
        json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    ]
    assert [each["step"] for each in of_steps] == [*range(1, 10)]
    of_samples = {"samples", "reward", "reward_std", "equal_rewards", "answer_tokens", "cut_off"}
    assert {*of_steps[1]} == {"step", "version", *of_samples, "loss", "grad_norm", "time"}
    assert {*of_steps[0]} == {*of_steps[1], "logprob_difference"}
    assert lines(second, "done: ") == ["9 steps, version 9 published"]
    assert lines(second, "in ")[0].endswith("logs, checkpoints/9")

    status, third = launch(job)
    assert (status, third.splitlines()[-1]) == (
        0,
        (
            f"nothing to do: the checkpoint {tmp_path}/out/checkpoints/9 has 9 steps already; "
            "to train more, set more steps or another output_dir"
        ),
    )
    job.write_text(job.read_text().replace('resume = "auto"', ""))
    status, other = launch(job)
    assert status == 2
    assert "output_dir must be a folder without another run, got " in other
    assert 'checkpoints/8, checkpoints/9, metrics.jsonl, summary.json; set resume = "auto"' in other


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_job_continues_with_the_tasks_of_its_journal(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Check that the last weights were trained on each prompt once, after an end of the controller between checkpoints."""
    job, _ = counting_job(tmp_path, save_every=2)
    first = ""
    with start(job) as (process, output):
        for line in output:
            first += line
            if line.startswith("AFTER 4"):
                process.send_signal(number)
        status = process.wait(timeout=120)
    assert status == (-number if number is signal.SIGKILL else 128 + number), first
    status, second = launch(job)
    assert status == 0, second
    (saved,) = (int(line.split()[-2]) for line in lines(second, "continues from"))
    if number is signal.SIGKILL:
        assert saved in {4, 6}
    else:
        # A signal lets a running step end, and saves a checkpoint.
        assert saved == len(lines(first, "TRAIN ")) >= 5
    assert lines(second, "ENDED ")[0].startswith("12 "), second
    kept = [n for line in lines(first, "TRAIN ")[:saved] for n in numbers(line)]
    lost = [n for line in lines(first, "TRAIN ")[saved:] for n in numbers(line)]
    after = [n for line in lines(second, "TRAIN ") for n in numbers(line)]
    # The recipe has a prompt for each group of the 12 steps.
    assert sorted(kept + after) == [*range(1, 25)]
    assert {*lost} <= {*after}
    # The second run submits no rollout so early that its answer becomes too old.
    journal = (tmp_path / "journal").read_text()
    assert not re.findall(r'"resubmitted","task_id":"\w+\.1-\d+"', journal)
    assert open_tasks(tmp_path / "journal") == []


def open_tasks(journal: Path) -> list[str]:
    """Return the rollouts that another run would train on."""
    entry: Any = Entry
    state = PersistedState.of(read_entries(journal, entry)[0])
    assert state is not None
    return [*state.tasks]


KILLED_BEFORE_THE_JOURNAL = """
import os, shutil, signal, sys

def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("/6/job.json"):
        shutil.copy(*arguments[:2])
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
"""


def killed_after(recipe: str, step: int) -> str:
    printed = 'print("AFTER"'
    assert printed in recipe
    return "import os\n" + recipe.replace(
        printed, f"step == {step} and os.kill(os.getpid(), 9); {printed}"
    )


def killed_with_batch(recipe: str, step: int) -> str:
    """Return the recipe with a `kill -9` of the job between taking the batch of `step` and training on it."""
    printed = 'print("TRAIN"'
    assert recipe.count(printed) == 1
    return "import os\n" + recipe.replace(
        printed, f"step == {step} and os.kill(os.getpid(), 9); {printed}"
    )


def kills_rank(recipe: str, step: int) -> str:
    """Return the recipe with a `kill -9` of the trainer rank when the ranks are about to train `step` for the first time."""
    kill = """
    killed = False

    def kill_rank(self):
        self.killed = True
        (rank,) = (each for each in self.scheduler.list() if each.name == "trainer-0")
        os.kill(rank.pid, 9)

"""
    changes = {
        "    number = 0\n": f"    number = 0\n{kill}",
        "self.controller = controller": "self.controller, self.scheduler = controller, scheduler",
        'print("TRAIN"': f'step == {step} and not self.killed and self.kill_rank(); print("TRAIN"',
    }
    for old, new in changes.items():
        assert recipe.count(old) == 1
        recipe = recipe.replace(old, new)
    return f"import os\n{recipe}"


def counting_job(
    folder: Path, save_every: int = 3, *, has_journal: bool = True, top: str = ""
) -> tuple[Path, str]:
    """Write a job of 12 steps with counted prompts. Return its file and its recipe."""
    script = folder / "padded.py"
    script.write_text(PADDED.format(example=str(EXAMPLE / "trainer.py")))
    job = write_job(
        folder,
        COUNTING,
        top=f'steps = 12\nresume = "auto"\n{top}',
        trainer=f"save_every = {save_every}",
        rollout=f'journal = "{folder}/journal"' if has_journal else "",
        script=script,
    )
    return job, (folder / "recipe.py").read_text()


def run_all(job: Path, recipes: Sequence[str], first_steps: Sequence[int]) -> list[list[list[int]]]:
    """Launch a job with one recipe after the other. Return the trained prompts of each run, by step.

    The last run must end after step 12, and all others must be killed. Each run must continue from the checkpoint after
    its `first_steps`; 0 means no checkpoint.
    """
    printed, trained = "", []
    for number, (text, first_step) in enumerate(zip(recipes, first_steps, strict=True)):
        (job.parent / "recipe.py").write_text(text)
        status, printed = launch(job)
        assert status == (0 if text is recipes[-1] else -signal.SIGKILL), (number, printed)
        found = [line.split()[-2] for line in lines(printed, "continues from")]
        assert found == ([str(first_step)] if first_step else []), (number, printed)
        trained.append([numbers(line) for line in lines(printed, "TRAIN ")])
    assert lines(printed, "ENDED ")[0].startswith("12 "), printed
    return trained


def test_a_job_that_is_killed_three_times_trains_each_prompt_once(tmp_path: Path) -> None:
    """Kill the job before its first checkpoint, between the record of a checkpoint and the journal, and between checkpoints."""
    job, recipe = counting_job(tmp_path)
    recipes = [
        killed_after(recipe, 1),
        KILLED_BEFORE_THE_JOURNAL + recipe,
        killed_after(recipe, 9),
        recipe,
    ]
    trained = run_all(job, recipes, (0, 0, 6, 9))
    # The last weights contain the steps before the checkpoint from which the next run continues.
    kept = [*trained[1][:6], *trained[2][:3], *trained[3]]
    assert sorted(n for step in kept for n in step) == [*range(1, 25)]
    assert open_tasks(tmp_path / "journal") == []


@pytest.mark.parametrize("has_journal", [False, True], ids=["memory", "journal"])
def test_a_job_that_is_killed_with_a_taken_batch_trains_each_prompt_once(
    tmp_path: Path, has_journal: bool
) -> None:
    """Kill the job with a batch that no step has trained on, first behind a checkpoint and then with two steps in between."""
    job, recipe = counting_job(tmp_path, has_journal=has_journal)
    recipes = [killed_with_batch(recipe, 3), killed_with_batch(recipe, 8), recipe]
    trained = run_all(job, recipes, (0, 3, 6))
    kept = [*trained[0][:3], *trained[1][:3], *trained[2]]
    assert sorted(n for step in kept for n in step) == [*range(1, 25)]
    if has_journal:
        assert open_tasks(tmp_path / "journal") == []


def test_a_killed_job_drops_no_group_of_the_steps_since_its_checkpoint(tmp_path: Path) -> None:
    """Kill the job four steps after its checkpoint. The answers of these steps are too old for the newest version."""
    job, recipe = counting_job(tmp_path, save_every=5)
    job.write_text(job.read_text().replace("[rollout]", '[rollout]\non_stale = "drop"'))
    (tmp_path / "recipe.py").write_text(killed_after(recipe, 8))
    status, printed = launch(job)
    assert status == -signal.SIGKILL, printed
    lost = [numbers(line) for line in lines(printed, "TRAIN ")][5:]
    assert len(lost) == 4
    (tmp_path / "recipe.py").write_text(recipe)
    status, printed = launch(job)
    assert status == 0, printed
    # The other answers were generated by the weights of these steps, and may be too old after them.
    again = [numbers(line) for line in lines(printed, "TRAIN ")]
    assert {n for step in lost for n in step} <= {n for step in again for n in step}, printed


@pytest.mark.parametrize(
    "has_journal",
    [pytest.param(False, id="memory"), pytest.param(True, id="journal", marks=pytest.mark.long)],
)
def test_a_restart_of_ranks_trains_again_on_the_groups_since_the_checkpoint(
    tmp_path: Path, has_journal: bool
) -> None:
    """Kill the rank in the sixth step. The checkpoint has three steps, so the job trains again on the groups of three steps."""
    job, recipe = counting_job(tmp_path, has_journal=has_journal, top="audit = true")
    (trained,) = run_all(job, [kills_rank(recipe, 5)], (3,))
    # The recipe has a prompt for each group of the 12 steps.
    assert sorted(n for step in (*trained[:3], *trained[6:]) for n in step) == [*range(1, 25)]
    assert trained[3:6] == trained[6:9]
    # The fourth and fifth step led to the versions 4 and 5. Version 6 has the weights of version 3 again.
    audit = tmp_path / "out" / AUDIT
    for step, version, again in ((4, 4, 7), (5, 5, 8)):
        first, second = read_audit(audit, version), read_audit(audit, again)
        assert (first.step, second.step) == (step, step)
        assert first.samples == second.samples
    assert read_audit(audit, 15).step == 12
    if has_journal:
        assert open_tasks(tmp_path / "journal") == []


def test_a_job_that_is_killed_after_a_restart_of_its_ranks_trains_each_prompt_once(
    tmp_path: Path,
) -> None:
    """Kill the rank in the sixth step, and the controller while the job trains on the groups since the checkpoint again."""
    job, recipe = counting_job(tmp_path)
    killed_again = kills_rank(recipe, 5).replace(
        'print("AFTER"', 'self.killed and step == 4 and os.kill(os.getpid(), 9); print("AFTER"'
    )
    trained = run_all(job, [killed_again, recipe], (3, 3))
    kept = [*trained[0][:3], *trained[1]]
    assert sorted(n for step in kept for n in step) == [*range(1, 25)]
    assert open_tasks(tmp_path / "journal") == []


STOPPED_IN_LOAD = """
import signal, time

class Stopped(FsdpEngine):
    def load(self, path):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(2.0)
        super().load(path)

torch.set_num_threads(1)
run_train_worker(Stopped("""


def test_a_signal_while_ranks_load_a_checkpoint_saves_none_with_other_weights(
    tmp_path: Path,
) -> None:
    """Kill the rank in the fourth step, and stop the job while the new rank loads the checkpoint of two steps."""
    job, recipe = counting_job(tmp_path, save_every=2)
    script = tmp_path / "padded.py"
    start_of_worker = "\ntorch.set_num_threads(1)\nrun_train_worker(FsdpEngine("
    assert script.read_text().count(start_of_worker) == 1
    script.write_text(script.read_text().replace(start_of_worker, STOPPED_IN_LOAD))
    (tmp_path / "recipe.py").write_text(kills_rank(recipe, 3))
    status, printed = launch(job)
    assert status == 128 + signal.SIGTERM, printed
    assert lines(printed, "step ")[-1].startswith("3: "), printed
    assert os.listdir(tmp_path / "out/checkpoints") == ["2"], printed
    assert lines(printed, "to continue after step ")[0].startswith("2 from "), printed


@pytest.mark.long
def test_a_checkpoint_before_the_recipe_is_loaded_keeps_its_position(tmp_path: Path) -> None:
    """The second run trains on the journal's groups while its recipe loads, saves a checkpoint, and is killed."""
    job, recipe = counting_job(tmp_path)
    loaded = 'self.number = state["number"]'
    assert loaded in recipe
    loading = recipe.replace(loaded, "import time; time.sleep(3600)")
    recipes = [killed_after(recipe, 4), killed_after(loading, 5), recipe]
    trained = run_all(job, recipes, (0, 3, 6))
    kept = [*trained[0][:3], *trained[1][:3], *trained[2]]
    assert sorted(n for step in kept for n in step) == [*range(1, 25)]


EVALUATING = """
    import itertools
    from windlass.jobs import Recipe, Task

    async def chain(context):
        first = await context.generate(tuple(context.arguments))
        return [*first.output.output_ids]

    class R(Recipe):
        def tasks(self):
            for n in itertools.count():
                yield Task(prompt_ids=(1, 2, n % 60))

        def rewards(self, group):
            return [float(len(rollout.versions)) for rollout in group.rollouts]

        def workflows(self):
            return {"chain": chain}

        def evaluation_tasks(self):
            return [Task(prompt_ids=(3, 4, 5)), Task(workflow="chain", arguments=[3, 4, 5], metadata="m")]

        def evaluation_metrics(self, groups):
            plain, chained = groups
            assert chained.metadata == "m" and len(plain.rollouts) == len(chained.rollouts) == 2
            # Greedy answers to one prompt are equal.
            answers = {rollout.output_ids for rollout in plain.rollouts}
            answers |= {tuple(rollout.value) for rollout in chained.rollouts}
            versions = {v for group in groups for rollout in group.rollouts for v in rollout.versions}
            (version,) = versions
            return {**super().evaluation_metrics(groups), "answers": len(answers), "of": version}
"""


def test_a_job_evaluates_versions_that_its_engines_serve(tmp_path: Path) -> None:
    """With replicas, a step ends before its version is published, and the evaluation waits for this version."""
    job = write_job(tmp_path, EVALUATING, top='steps = 5\nreplica = "host"')
    job.write_text(f"{job.read_text()}\n[evaluation]\nevery = 2\nsamples_per_task = 2\n")
    status, printed = launch(job)
    assert status == 0, printed
    found = [
        json.loads(line) for line in (tmp_path / "out/evaluations.jsonl").read_text().splitlines()
    ]
    assert [{**each, "time": 0} for each in found] == [
        {"step": n, "version": n, "reward": 4.0, "answers": 1, "of": n, "time": 0} for n in (2, 4)
    ]
    assert "evaluation of version 2: reward 4, answers 1, of 2\n" in printed


def test_a_job_that_continues_repeats_an_evaluation_that_has_not_ended(tmp_path: Path) -> None:
    """A signal stops the job in the evaluation of step 2, and `kill -9` in the evaluation of the last step."""
    ends = """
        def evaluation_tasks(self):
            file = pathlib.Path({file!r})
            first, _, others = file.read_text().partition(" ")
            file.write_text(others)
            if first.isdecimal():
                os.kill(os.getpid(), int(first))
                time.sleep(5)
            return [Task(prompt_ids=(3, 4, 5))]

        def evaluation_metrics(self, groups):
            return {{"of": max(groups[0].rollouts[0].versions)}}

    import os, pathlib, time
"""
    (tmp_path / "ends").write_text(f"{signal.SIGTERM:d} no {signal.SIGKILL:d} no")
    recipe = EVALUATING + ends.format(file=str(tmp_path / "ends"))
    job = write_job(tmp_path, recipe, top='steps = 4\nresume = "auto"', trainer="save_every = 2")
    job.write_text(f"{job.read_text()}\n[evaluation]\nevery = 2\n")
    runs = [launch(job) for _ in range(4)]
    statuses = [status for status, _ in runs]
    assert statuses == [128 + signal.SIGTERM, -signal.SIGKILL, 0, 0], runs
    assert [len(lines(printed, "step ")) for _, printed in runs] == [2, 2, 0, 0]
    assert "nothing to do: " in runs[3][1]
    found = [
        json.loads(line) for line in (tmp_path / "out/evaluations.jsonl").read_text().splitlines()
    ]
    assert [(each["step"], each["of"]) for each in found] == [(2, 2), (4, 4)]


def test_the_time_of_an_evaluation_is_not_time_without_room_for_tasks(tmp_path: Path) -> None:
    """Tasks wait for room during an evaluation and a hook. Both take longer than the tasks may wait for room."""
    recipe = (
        EVALUATING.replace("return [Task(", "time.sleep(9); return [Task(")
        + """
        async def after_step(self, step, result):
            if step == 0:
                await asyncio.sleep(9)

    import asyncio, time
    import windlass.jobs.launch
    windlass.jobs.launch.room_deadline_s = lambda config: 8.0
"""
    )
    job = write_job(tmp_path, recipe, top="steps = 6", rollout="max_staleness = 0")
    job.write_text(f"{job.read_text()}\n[evaluation]\nevery = 4\nsamples_per_task = 2\n")
    status, printed = launch(job)
    assert status == 0, printed
    assert "done: 6 steps, version 6 published" in printed


def test_an_evaluation_that_the_recipe_does_not_define_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, plain(), top="steps = 3")
    job.write_text(f"{job.read_text()}\n[evaluation]\nevery = 2\n")
    status, printed = launch(job)
    assert status == 2, printed
    assert (
        "recipe.name must be a class that defines evaluation_tasks if evaluation.every > 0, got 'R'"
        in printed
    )


def numbers(line: str) -> list[int]:
    found: list[int] = json.loads(line.partition("]")[0] + "]")
    return found


PLAIN = """
    import itertools, math
    from windlass.jobs import Recipe, Task

    class R(Recipe):
        def tasks(self):
            for n in TASKS:
                yield Task(prompt_ids=(1, 2, n % 60))

        def rewards(self, group):
            return REWARDS
"""


def plain(tasks: str = "itertools.count()", rewards: str = "[1.0, 0.0]") -> str:
    return PLAIN.replace("TASKS", tasks).replace("REWARDS", rewards)


def published(tmp_path: Path) -> Any:
    page = (tmp_path / "out" / "report.html").read_text()
    return json.loads(page.partition('"published_version":')[2].partition(",")[0])


@pytest.mark.long
def test_a_step_with_a_metric_that_is_not_finite_is_neither_published_nor_saved(
    tmp_path: Path,
) -> None:
    script = tmp_path / "trainer.py"
    source = (EXAMPLE / "trainer.py").read_text()
    assert "return found" in source
    script.write_text(source.replace("return found", "return found * found.new_tensor(math.nan)"))
    script.write_text(script.read_text().replace("import json", "import json, math"))
    job = write_job(tmp_path, plain(), top="steps = 3", trainer="save_every = 1", script=script)
    status, printed = launch(job)
    assert status == 2, printed
    assert (
        "step 1: metrics must be finite, got grad_norm nan, loss nan; the weights of this step are"
        in printed
    )
    assert published(tmp_path) == 0
    assert not (tmp_path / "out/checkpoints").exists()


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (plain(rewards="[1.0, math.nan]"), r"group 0: rewards[1] must be finite, got nan"),
        pytest.param(
            plain(tasks="(5,)"),
            "tasks ended after 0 steps; 1 group left over, a step takes 2; the job has trained nothing",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_job_that_trains_nothing_fails_with_the_reason(
    tmp_path: Path, recipe: str, says: str
) -> None:
    status, printed = launch(write_job(tmp_path, recipe, top="steps = 3"))
    assert status == 2, printed
    error, logs = printed.splitlines()[-2:]
    assert says in error
    assert logs == f"the logs are in {tmp_path}/out/logs"
    assert "Traceback" not in printed


@pytest.mark.long
def test_groups_that_are_left_over_are_counted(tmp_path: Path) -> None:
    status, printed = launch(write_job(tmp_path, plain(tasks="range(3)"), top="steps = 3"))
    assert status == 0, printed
    assert "the recipe's tasks ended after 1 step; 1 group left over, a step takes 2\n" in printed


@pytest.mark.long
def test_restarts_of_a_worker_count_only_until_the_job_makes_progress(tmp_path: Path) -> None:
    job = write_job(
        tmp_path, plain(), top="steps = 30", rollout="max_worker_restarts = 1", num_workers=1
    )
    printed, killed, waits_for = "", 0, 0
    with start(job) as (process, output):
        for line in output:
            printed += line
            num_steps = len(lines(printed, "step "))
            if "worker worker-0 connected" in line and killed < 3:
                waits_for = num_steps + 2
            elif line.startswith("step ") and killed < 3 and num_steps == waits_for:
                killed += 1
                kill_worker(process.pid)
        assert process.wait(timeout=120) == 0, printed
    assert killed == 3
    assert (
        printed.count("worker-0 ended with exit status -9 after 0 restarts; starting it again") == 3
    )


def kill_worker(parent: int) -> None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text()
                is_child = f"\nPPid:\t{parent}\n" in (entry / "status").read_text()
            except OSError:
                # The process has ended.
                continue
            if is_child and "windlass.rollout.worker" in words:
                os.kill(int(entry.name), signal.SIGKILL)
