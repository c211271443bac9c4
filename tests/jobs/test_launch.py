"""`windlass launch` with real processes: the whole example, and signals in the middle of an update."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from slurm_cluster import missing_reason, slurm_cluster

from windlass.jobs.audit import AUDIT, read_audit
from windlass.jobs.schedulers.ray import NICENESS
from windlass.wording import shortest_path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "launch"
RANK = Path(__file__).parents[1] / "support" / "launch_rank.py"
DEADLINE_S = 240


def write(tmp_path: Path, *replacements: tuple[str, str]) -> Path:
    text = (EXAMPLE / "job.toml").read_text().replace("{here}", str(EXAMPLE))
    for old, new in (("launch-output", str(tmp_path / "out")), *replacements):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


@contextmanager
def launched(config: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Yield the job's process, and check at its end that all processes of the job have ended."""
    token = uuid.uuid4().hex
    with (config.parent / "stderr").open("w") as log:
        job = subprocess.Popen(
            (sys.executable, "-m", "windlass.cli.main", "launch", str(config)),
            env={**os.environ, "WINDLASS_TOKEN": token, **environment},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield job
        job.wait(timeout=DEADLINE_S)
        assert carriers(token) == []
    finally:
        job.kill()
        job.wait()
        if job.stdout is not None:
            job.stdout.close()


def carriers(token: str) -> list[str]:
    """Return the command lines of live processes with this token."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if token.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                # The process has ended.
                continue
    return found


def read_until(job: subprocess.Popen[str], start: str) -> str:
    assert job.stdout is not None
    seen = []
    for line in job.stdout:
        seen.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(f"no line starts with {start!r}: {''.join(seen)}")


def wait_for(fifo: Path, job: subprocess.Popen[str]) -> None:
    """Wait until a rank has written to the fifo; fail if the job ends first."""
    reader, process = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), os.pidfd_open(job.pid)
    ready, _, _ = select.select([reader, process], [], [], DEADLINE_S)
    os.close(process)
    os.close(reader)
    if ready != [reader]:
        raise AssertionError(f"the rank did not come so far, the job ended with {job.poll()}")


def summary(tmp_path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / "out" / "summary.json").read_text())
    return found


def check_example(tmp_path: Path, config: Path, **environment: str) -> None:
    with launched(config, **environment) as job:
        printed, _ = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0, printed + (tmp_path / "stderr").read_text()
    lines = printed.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        "to watch",
        "step 1",
        "step 2",
        "done",
        f"in {shortest_path(tmp_path / 'out')}",
    ], printed
    found = summary(tmp_path)
    assert (found["steps"], found["version"], found["stopped_by"]) == (2, 2, 0)
    assert found["outcomes"] == ["published"] * 3
    rollouts = found["rollouts"]
    assert isinstance(rollouts, dict)
    assert rollouts["lost"] == 0
    assert rollouts["completed"] >= 2 * 32
    # The job saved this page before the engines left.
    page = (tmp_path / "out" / "report.html").read_text()
    assert '"published_version":2,' in page
    assert '"routable":true,' in page


# This test repeats the whole example; `make test-security` runs it.
@pytest.mark.long
def test_a_whole_job_uses_only_tls(tmp_path: Path) -> None:
    config = write(tmp_path, ("steps = 4", "steps = 2"))
    check_example(tmp_path, config, **Authority(tmp_path).issue())
    logs = "".join(log.read_text() for log in (tmp_path / "out" / "logs").iterdir())
    assert "https://127.0.0.1:" in logs
    assert "http://" not in logs


def test_the_example_trains_publishes_saves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    recipe = tmp_path / "declining.py"
    recipe.write_text(DECLINING)
    config = write(
        tmp_path,
        ("steps = 4", "steps = 2"),
        (str(EXAMPLE / "recipe.py"), str(recipe)),
        ("CountSevens", "EverySecond"),
    )
    environment = {"WINDLASS_LOG": "json", "WINDLASS_LOG_LEVEL": "DEBUG"}
    path = f"{EXAMPLE}:{os.environ.get('PYTHONPATH', '')}"
    check_example(tmp_path, config, **environment, PYTHONPATH=path)
    rollouts = summary(tmp_path)["rollouts"]
    assert isinstance(rollouts, dict)
    assert rollouts["completed"] - rollouts["declined"] == 2 * 32
    assert rollouts["declined"] > 0
    assert (tmp_path / "out" / "seen").read_text() == "() 0:32 1:32"
    assert (tmp_path / "out" / "checkpoints" / "2" / ".metadata").exists()
    check_logs(tmp_path)
    resumed = write(
        tmp_path,
        ("steps = 4", "steps = 3"),
        (
            "world_size = 2",
            f'world_size = 1\nresume_from = "{tmp_path / "out" / "checkpoints" / "2"}"',
        ),
        ("max_staleness = 1", "max_staleness = 1\nnum_workers = 0"),
        ('transport = "cma"', 'transport = "cma"\nreplica = "host"'),
    )
    with launched(resumed) as job:
        printed, _ = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0, printed + (tmp_path / "stderr").read_text()
    assert [line.split(" ")[0] for line in printed.splitlines()[2:]] == [
        "continues",
        "step",
        "done:",
        "in",
    ]
    # The last update was still under way when the job's work was done.
    found = summary(tmp_path)
    assert found["outcomes"] == ["published"] * 2
    assert (found["steps"], found["version"]) == (3, 3)


DECLINING = """
# Decline every second group. In total, this is more than the staleness bound allows ahead.
from pathlib import Path
from recipe import CountSevens

class EverySecond(CountSevens):
    def started(self, config, controller, scheduler):
        self.seen = Path(config.output_dir, "seen")
        self.seen.write_text(f"{scheduler.list()}")

    async def before_step(self, step, samples):
        with self.seen.open("a") as seen:
            seen.write(f" {step}:{len(samples)}")

    def samples(self, group):
        return () if group.group_id % 2 else super().samples(group)
"""


def check_logs(tmp_path: Path) -> None:
    """Check the JSON lines in the logs of the example's processes."""
    controller = [json.loads(line) for line in (tmp_path / "stderr").read_text().splitlines()]
    ended = [line for line in controller if line["message"].startswith("round published")]
    assert [line["version"] for line in ended] == [0, 1, 2]
    rounds = [line["round"] for line in ended]
    assert rounds == sorted(set(rounds))
    for line in ended:
        phases = [each for each in controller if each.get("round") == line["round"]]
        assert {"phase write", "phase publish"} <= {each["message"] for each in phases}
        assert {each["version"] for each in phases} == {line["version"]}
    assert {line["process"] for line in controller} == {"controller"}
    worker = (tmp_path / "out" / "logs" / "worker-0.log").read_text().splitlines()
    attempts = [json.loads(line) for line in worker if "attempt accepted" in line]
    assert len(attempts) >= 2 * 32
    # On a busy machine, some attempts exceed the staleness and are repeated.
    assert len({(line["task"], line["attempt"]) for line in attempts}) == len(attempts)
    assert {line["version"] for line in attempts} <= {0, 1, 2}
    assert {(line["process"], line["engine"]) for line in attempts} == {("worker-0", "engine-a")}
    engine = (tmp_path / "out" / "logs" / "engine-a.log").read_text().splitlines()
    commands = [json.loads(line) for line in engine if line.startswith("{") and '"round"' in line]
    assert set(rounds) <= {line["round"] for line in commands}


@pytest.mark.long
@pytest.mark.parametrize("goes_on", [True, False], ids=["it_ends", "it_is_given_up"])
def test_sigterm_during_an_update_waits_for_it_and_then_ends_the_job(
    tmp_path: Path, goes_on: bool
) -> None:
    publishing, go_on = tmp_path / "publishing", tmp_path / "go_on"
    os.mkfifo(publishing)
    os.mkfifo(go_on)
    config = write(
        tmp_path,
        ("steps = 4", f"steps = 4\nshutdown_s = {60.0 if goes_on else 0.5}"),
        (str(EXAMPLE / "trainer.py"), str(RANK)),
        ("world_size = 2", "world_size = 1"),
        ("max_staleness = 1", "max_staleness = 1\nnum_workers = 0"),
    )
    with launched(config, PUBLISHING=str(publishing), GO_ON=str(go_on)) as job:
        wait_for(publishing, job)
        job.send_signal(signal.SIGTERM)
        read_until(job, "SIGTERM: waiting for the end of a running step or update")
        if goes_on:
            go_on.write_text("go")
        job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 128 + signal.SIGTERM
    found = summary(tmp_path)
    done = 2 if goes_on else 1
    assert (found["steps"], found["version"], found["stopped_by"]) == (done, done, 15)
    assert found["outcomes"] == ["published"] * (done + 1)


@pytest.mark.long
def test_a_last_version_that_was_not_published_fails_the_job(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        ("steps = 4", "steps = 1\naudit = true"),
        (str(EXAMPLE / "trainer.py"), str(RANK)),
        ("world_size = 2", "world_size = 1"),
        ("max_staleness = 1", "max_staleness = 1\nnum_workers = 0"),
    )
    with launched(config, LOST="1") as job:
        said, _ = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 2
    assert said.splitlines()[-2] == "failed: 1 step, version 0 published"
    printed = (tmp_path / "stderr").read_text()
    assert "version 1 was not published; the published version is 0" in printed
    found = summary(tmp_path)
    assert (found["steps"], found["version"], found["stopped_by"]) == (1, 0, 0)
    assert not read_audit(tmp_path / "out" / AUDIT, 1).is_published


WATCHING = """
# Write one line per step with its samples, and with answers of the engine before the step.
import json
from pathlib import Path
from recipe import CountSevens
from windlass.jobs import Task
from windlass.rollout import SamplingParams

def written(answer):
    return [answer.versions, answer.prompt_ids, answer.output_ids, answer.logprobs]

class Watching(CountSevens):
    def tasks(self):
        while True:
            yield from (Task(prompt_ids=(1, 2, number)) for number in range(8))

    def started(self, config, controller, scheduler):
        self.seen, self.controller = Path(config.output_dir, "seen"), controller

    async def before_step(self, step, samples):
        greedy = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
        async with self.controller.evaluation() as evaluation:
            handles = [evaluation.submit((1, 2, number), greedy) for number in range(8)]
            answers = await evaluation.wait(handles, deadline_s=30)
        line = {"step": step, "samples": [*map(written, samples)], "answers": [*map(written, answers)]}
        with self.seen.open("a") as seen:
            seen.write(json.dumps(line) + "\\n")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "dies_in",
    [
        pytest.param("train_step", marks=pytest.mark.long),
        "write",
        pytest.param("save", marks=pytest.mark.long),
    ],
)
def test_a_job_restarts_a_dead_trainer_rank_from_its_checkpoint(
    tmp_path: Path, dies_in: str
) -> None:
    """Check a SIGKILL of rank 1 after step 2 was saved, when version 3 is served or half written.

    The engine must then serve the weights of step 2 again, under a new number. The steps after step 2 must get the same
    samples again. The samples of all other steps must have the version before their step.
    """
    recipe, died = tmp_path / "watching.py", tmp_path / "died"
    recipe.write_text(WATCHING)
    config = write(
        tmp_path,
        ("steps = 4", "steps = 5"),
        (str(EXAMPLE / "trainer.py"), str(RANK)),
        (str(EXAMPLE / "recipe.py"), str(recipe)),
        ("CountSevens", "Watching"),
        ("max_staleness = 1", "max_staleness = 0"),
        ("ignore_eos = true", "ignore_eos = true, temperature = 0.0"),
    )
    path = f"{EXAMPLE}:{os.environ.get('PYTHONPATH', '')}"
    with launched(config, DIES_IN=dies_in, DIED=str(died), PYTHONPATH=path) as job:
        printed, _ = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0, printed + (tmp_path / "stderr").read_text()
    assert died.exists()
    assert "starting the ranks again (restart 1 of at most 3)" in printed
    # Steps after the checkpoint that got their samples before the death.
    repeated = {"train_step": [2, 3], "write": [2], "save": [2, 3]}[dies_in]
    # The second version with the weights of step 2.
    again = 5 if dies_in == "save" else 4
    seen = [json.loads(line) for line in (tmp_path / "out" / "seen").read_text().splitlines()]
    assert [
        (each["step"], versions(each["samples"]), versions(each["answers"])) for each in seen
    ] == [
        *((step, {step}, {step}) for step in (0, 1, *repeated)),
        *((step, {step}, {again + step - 2}) for step in repeated),
        *((step, {again + step - 2}, {again + step - 2}) for step in range(2 + len(repeated), 5)),
    ]
    first, second = seen[2 : 2 + len(repeated)], seen[2 + len(repeated) :]
    for before, after in zip(first, second, strict=False):
        assert before["samples"] == after["samples"]
    found = summary(tmp_path)
    assert (found["steps"], found["version"], found["trainer_restarts"]) == (5, again + 3, 1)
    outcomes = found["outcomes"]
    assert isinstance(outcomes, list)
    assert len(outcomes) == again + 4
    assert outcomes.count("published") == again + 4 - (dies_in == "write")
    # A log-probability changes by up to 1e-6 with the other requests in the same batch.
    same = pytest.approx(logprobs(second[0]["answers"]), abs=1e-5)
    assert logprobs(first[0]["answers"]) == same
    assert logprobs(seen[1]["answers"]) != same


def versions(answers: list[Any]) -> set[int]:
    return {version for of_tokens, *_ in answers for version in of_tokens}


def logprobs(answers: list[Any]) -> dict[str, float]:
    """Return the log-probability of each first token, by prompt and token."""
    return {f"{prompt} {output[0]}": values[0] for _, prompt, output, values in answers}


def test_sigterm_before_the_fleet_is_complete_ends_the_job(tmp_path: Path) -> None:
    never = tmp_path / "never.py"
    never.write_text("import signal; signal.pause()")
    config = write(tmp_path, (str(EXAMPLE / "trainer.py"), str(never)))
    with launched(config) as job:
        read_until(job, "controller http://")
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 128 + signal.SIGTERM
    assert summary(tmp_path)["version"] == -1


def test_a_job_prints_a_command_that_shows_it_and_deletes_its_own_token(tmp_path: Path) -> None:
    never = tmp_path / "never.py"
    never.write_text("import signal; signal.pause()")
    config = write(tmp_path, (str(EXAMPLE / "trainer.py"), str(never)))
    own = {name: value for name, value in os.environ.items() if name != "WINDLASS_TOKEN"}
    with launched(config, WINDLASS_TOKEN="") as job:
        words = shlex.split(read_until(job, "to watch: ").removeprefix("to watch: "))
        name, _, file = words[0].partition("=")
        token = tmp_path / "out" / "token"
        assert (name, words[1]) == ("WINDLASS_TOKEN_FILE", "windlass")
        assert Path(file).resolve() == token.resolve()
        assert token.stat().st_mode & 0o777 == 0o600
        status = subprocess.run(
            (sys.executable, "-m", "windlass.cli.main", *words[2:-1], "--json"),
            env={**own, name: file}, capture_output=True, check=True, timeout=60,
        )  # fmt: skip
        assert json.loads(status.stdout)["engines"] == []
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=DEADLINE_S)
    assert not token.exists()


def test_a_start_that_times_out_names_the_missing_members_and_their_logs(tmp_path: Path) -> None:
    never = tmp_path / "never.py"
    never.write_text("import signal; signal.pause()")
    script, start = str(EXAMPLE / "trainer.py"), "steps = 4"
    config = write(tmp_path, (script, str(never)), (start, f"{start}\nstart_deadline_s = 1"))
    with launched(config) as job:
        job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 2
    printed = (tmp_path / "stderr").read_text()
    assert "PeerTimeout: starting trainer ranks and engines: " in printed
    assert (
        " s of at most 1 s; not connected yet: weights of trainers (0 of 2 ranks), engine-a\n"
        in printed
    )
    assert f"\nthe logs are in {tmp_path}/out/logs\nnext: read the log of each" in printed
    assert "windlass status" not in printed
    assert "Traceback" not in printed


def test_a_terminal_shows_the_members_that_a_start_waits_for(tmp_path: Path) -> None:
    never = tmp_path / "never.py"
    never.write_text("import signal; signal.pause()")
    script, start = str(EXAMPLE / "trainer.py"), "steps = 4"
    config = write(tmp_path, (script, str(never)), (start, f"{start}\nstart_deadline_s = 2"))
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        (sys.executable, "-m", "windlass.cli.main", "launch", str(config)),
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while part := terminal.read(1 << 16):
            shown += part
    assert job.wait(timeout=DEADLINE_S) == 2
    part = b"starting trainer ranks and engines: %d s of at most 2 s; not connected yet: weights"
    before_its_end = shown.partition(b"gave up")[0]
    assert {n for n in range(3) if part % n in before_its_end} >= {0, 1}


def test_a_trainer_that_dies_fails_the_job_with_its_log(tmp_path: Path) -> None:
    dies = tmp_path / "dies.py"
    dies.write_text("raise SystemExit('no such optimizer')")
    with launched(write(tmp_path, (str(EXAMPLE / "trainer.py"), str(dies)))) as job:
        job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 2
    printed = (tmp_path / "stderr").read_text()
    assert "TrainerError: connect: trainer-" in printed
    assert "no such optimizer" in printed


# This test repeats the whole example. test_schedulers.py also tests GPUs.
@pytest.mark.long
def test_an_engine_shares_the_reservation_of_a_trainer_rank(tmp_path: Path) -> None:
    """Check also that each rank sees the GPU that it reserved, and local rank 0."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib\n"
        "seen = [os.environ[v] for v in ('CUDA_VISIBLE_DEVICES', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')]\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(' '.join(seen))\n"
        + (EXAMPLE / "trainer.py").read_text().replace("from __future__ import annotations\n", "")
    )
    changes = (
        ("steps = 4", "steps = 2"),
        ('kind = "local"', 'kind = "local"\ngpus = ["4", "6"]'),
        (f"{EXAMPLE}/trainer.py", str(script)),
        ("world_size = 2", "world_size = 2\nnum_gpus = 1"),
        ('name = "engine-a"', 'name = "engine-a"\ncolocate_with = "trainer-1"'),
    )
    check_example(tmp_path, write(tmp_path, *changes))
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["4 0 1", "6 0 1"]


@pytest.mark.cluster
@pytest.mark.skipif(bool(missing_reason()), reason=missing_reason())
def test_the_example_runs_as_slurm_jobs(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    scheduler = ('kind = "local"', 'kind = "slurm"\nhost = "127.0.0.1"')
    with slurm_cluster(tmp_path / "slurm") as conf:
        config = write(tmp_path, ("steps = 4", "steps = 2"), scheduler)
        check_example(tmp_path, config, SLURM_CONF=str(conf))


def several_nodes(tmp_path: Path, address: str, *replacements: tuple[str, str]) -> Path:
    """Write the job of docs/cluster.md for a controller at this address."""
    text = (EXAMPLE / "slurm.toml").read_text().replace("{here}", str(EXAMPLE))
    for old, new in (
        *replacements,
        ("launch-output", str(tmp_path / "out")),
        ("10.0.0.1", address),
    ):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.cluster
@pytest.mark.skipif(bool(missing_reason()), reason=missing_reason())
def test_the_example_of_several_nodes_runs_on_slurm(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm", num_nodes=2, gpus_per_node=4) as conf:
        check_example(tmp_path, several_nodes(tmp_path, "127.0.0.1"), SLURM_CONF=str(conf))


@pytest.mark.cluster
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
# Ray does not close its own sockets and files.
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_several_nodes_runs_on_ray(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    text = (EXAMPLE / "slurm.toml").read_text()
    table = text[text.index("[scheduler]") : text.index("[controller]")]
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=6, num_gpus=4, env_vars={NICENESS: "0"})
        ray = f'[scheduler]\nkind = "ray"\naddress = "{cluster.address}"\n\n'
        address = cluster.address.rpartition(":")[0]
        check_example(tmp_path, several_nodes(tmp_path, address, (table, ray)))
    finally:
        cluster.shutdown()


@pytest.mark.cluster
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_example_runs_in_ray_placement_groups(tmp_path: Path) -> None:
    scheduler = ('kind = "local"', 'kind = "ray"\nnum_cpus = 6')
    check_example(tmp_path, write(tmp_path, ("steps = 4", "steps = 2"), scheduler))
