"""The launch file: accepted settings, and errors for refused settings."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from idle_scheduler import IdleScheduler

from tools.entry_points import write_entry_points
from windlass.cli.main import main
from windlass.config import DiskBackend, PluginBackend, UpdateMode
from windlass.controller import Controller
from windlass.errors import ConfigError
from windlass.jobs import LaunchConfig, PluginSchedulerConfig, create_scheduler, launch, load_config
from windlass.jobs.config import mistakes_of
from windlass.jobs.launch import check_host, check_job, job_processes
from windlass.jobs.recipe import load_recipe
from windlass.jobs.schedulers.slurm import SlurmSchedulerConfig
from windlass.progress import Progress
from windlass.rollout import RolloutConfig, RolloutGroup, SamplingParams
from windlass.rollout.messages import OnAbort

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch" / "job.toml"
PLUGINS = Path(__file__).resolve().parents[2] / "examples" / "plugins"
TWO_NODES = "world_size = 2\nnum_nodes = 2"


def write(tmp_path: Path, *replacements: tuple[str, str]) -> Path:
    """Write a changed copy of the example's file; `{here}` still means the folder of the example."""
    text = EXAMPLE.read_text().replace("{here}", str(EXAMPLE.parent))
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_the_example_job_is_valid_and_its_paths_are_relative_to_its_folder() -> None:
    config = load_config(EXAMPLE)
    assert config.trainer.script == str(EXAMPLE.parent / "trainer.py")
    assert config.engines[0].model == str(EXAMPLE.parent / "model.json")
    assert load_recipe(Path(config.recipe.file), config.recipe.name).workflows() == {}


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_engines"), [("slurm.toml", 4, 2), ("slurm-32-hosts.toml", 128, 8)]
)
def test_the_examples_of_several_nodes_are_valid(
    name: str, num_ranks: int, num_engines: int
) -> None:
    config = load_config(EXAMPLE.with_name(name))
    check_job(config)
    assert (config.trainer.world_size, len(config.engines)) == (num_ranks, num_engines)


def test_tables_choose_scheduler_backend_and_update_policy(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            ('kind = "local"', 'kind = "slurm"\noptions = ["--partition=gpu"]'),
            ('{ type = "p2p" }', '{ type = "disk", folder = "/weights" }'),
            ('mode = "in_place"', 'mode = "staged"\ndeadlines = { write_s = 7.0 }'),
        )
    )
    assert config.scheduler == SlurmSchedulerConfig(options=("--partition=gpu",))
    assert config.update.backend == DiskBackend("/weights")
    assert config.update.mode is UpdateMode.STAGED
    assert config.update.deadlines.write_s == 7.0


def test_a_backend_of_another_package_has_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = write_entry_points(tmp_path / "site", PLUGINS / "backend")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site), str(PLUGINS / "backend")])
    table = '{ type = "plugin", name = "waves", options = { width = 2 } }'
    backend = load_config(write(tmp_path, ('{ type = "p2p" }', table))).update.backend
    assert backend == PluginBackend("waves", {"width": 2})
    wrong = table.replace("width = 2", 'names = ["a"]')
    with pytest.raises(ConfigError, match=r"update: waves: options must be a width of 1 or more"):
        load_config(write(tmp_path, ('{ type = "p2p" }', wrong)))


def test_a_scheduler_of_another_package_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = 'kind = "plugin"\nname = "slots"\noptions = { num_cpus = 8 }'
    config = load_config(write(tmp_path, ('kind = "local"', table)))
    with pytest.raises(
        ConfigError, match=r"scheduler must be one of none, or be added by .*windlass\.schedulers"
    ):
        check_job(config)
    site = write_entry_points(tmp_path / "site", PLUGINS / "scheduler")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site), str(PLUGINS / "scheduler")])
    check_job(config)
    with pytest.raises(ConfigError, match=r"scheduler\.options must be a num_cpus of 1 or more"):
        create_scheduler(PluginSchedulerConfig("slots"), tmp_path)
    two_nodes = write(tmp_path, ('kind = "local"', table), ("world_size = 2", TWO_NODES))
    with pytest.raises(
        ConfigError, match=r"trainer\.num_nodes must be 1, got 2: the scheduler has"
    ):
        check_job(load_config(two_nodes))


def test_a_replica_is_set_with_the_transport_and_needs_p2p(tmp_path: Path) -> None:
    asked = ('transport = "cma"', 'transport = "cma"\nreplica = "host"')
    assert load_config(write(tmp_path, asked)).replica == "host"
    assert load_config(EXAMPLE).replica == "off"
    with pytest.raises(ConfigError, match=r"backend must be p2p if replica is 'host', got 'xccl'"):
        load_config(write(tmp_path, asked, ('type = "p2p"', 'type = "xccl"')))


def test_steps_include_the_steps_of_a_resumed_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"steps": 4, "version": 7}')
    resumed = ("world_size = 2", f'world_size = 2\nresume_from = "{tmp_path}"')
    with pytest.raises(ConfigError, match=r"steps must be > 4, the steps of the checkpoint"):
        load_config(write(tmp_path, resumed))
    assert load_config(write(tmp_path, resumed, ("steps = 4", "steps = 5"))).steps == 5


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps = 4", "steps = 0", r"job\.toml: steps must be >= 1, got 0"),
        (
            "world_size = 2",
            'world_size = 2\nresume_from = "/nowhere"',
            r"trainer\.resume_from must be a folder, got '/nowhere'",
        ),
        (
            "world_size = 2",
            f'world_size = 2\nresume_from = "{EXAMPLE.parent}"',
            r"resume_from must be the folder of a finished checkpoint, with job\.json",
        ),
        (
            "world_size = 2",
            "world_size = 2\nmax_restarts = -1",
            r"max_restarts must be >= 0, got -1",
        ),
        ("steps = 4", "", r"job\.toml: steps must be given, got none"),
        ("groups_per_step = 8", "", r"rollout\.groups_per_step must be given, got none"),
        (
            "groups_per_step = 8",
            "group_per_step = 8",
            r"rollout\.group_per_step is not a known key, expected one of \['groups_per_step'",
        ),
        ('model = "', 'modle = "', r"engines\[0\]\.modle is not a known key, .*\['model', "),
        (
            "ignore_eos = true",
            "topk = 3",
            r"sampling\.topk is not a known key, .*\['top_k', .*'stop_token_ids'",
        ),
        (
            "world_size = 2",
            "save_evry = 2\nworld_size = 2",
            r"trainer\.save_evry is not a known key, expected one of \['save_every', .*'world_size'",
        ),
        (
            'mode = "in_place"',
            "save_every = 2",
            r"update\.save_every is not a known key, .*; save_every is a key of \[trainer\]",
        ),
        (
            'mode = "in_place"',
            "shutdown_s = 2.0",
            r"shutdown_s is a key of the top level of the file",
        ),
        (
            "groups_per_step = 8",
            "groups_per_step = 1",
            r"rollout\.groups_per_step must be >= 2, .*data-parallel rank, got 1; set trainer\.data",
        ),
        (
            "world_size = 2",
            "world_size = 2\ndata_parallel_size = 3",
            r"trainer\.data_parallel_size must divide world_size, got 3 and 2",
        ),
        ("max_staleness = 1", "max_attempts = 0", r"rollout\.max_attempts must be >= 1, got 0"),
        ("max_staleness = 1", "journal = 3", r"rollout\.journal must be a path, got 3"),
        (
            "max_staleness = 1",
            "acknowledge = false",
            r"rollout\.acknowledge must be true in a job, got false; leave the key out: the job itself",
        ),
        ("steps = 4", "steps = 4 5", r"job\.toml: .*line 4"),
        (
            "steps = 4",
            "stepz = 4\nsteps = 4",
            r"stepz is not a known key, expected one of \['steps', 'audit', 'contr",
        ),
        (
            "world_size = 2",
            'world_size = "two"',
            r"trainer\.world_size must be an integer, got 'two'",
        ),
        ("world_size = 2", "world_size = 0", r"trainer\.world_size must be >= 1, got 0"),
        ("world_size = 2", "worldsize = 2", r"trainer\.worldsize is not a known key"),
        (
            'mode = "in_place"',
            'mode = "hot"',
            r"update\.mode must be one of \['in_place', .*\], got 'hot'",
        ),
        (
            "max_staleness = 1",
            'on_stale = "keep"',
            r"rollout\.on_stale must be one of \['.*\], got 'keep'",
        ),
        (
            "world_size = 2",
            'world_size = 2\nenvironment = { A = "1", OMP_NUM_THREADS = 1 }',
            r"trainer\.environment\.OMP_NUM_THREADS must be text, got 1",
        ),
        ('mode = "in_place"', "minengines = 2", r"update\.minengines is not a known key"),
        (
            'mode = "in_place"',
            "deadlines = { rite_s = 1.0 }",
            r"update\.deadlines\.rite_s is not a known key",
        ),
        (
            'mode = "in_place"',
            "deadlines = { write_s = -1.0 }",
            r"write_s must be > 0, got -1\.0",
        ),
        (
            'type = "p2p"',
            'type = "pigeon"',
            r"update\.backend\.type must be one of \['p2p', .*, got 'pigeon'",
        ),
        (
            'kind = "local"',
            'kind = "pbs"',
            r"scheduler\.kind must be one of \['local', 'slurm', .*, got 'pbs'",
        ),
        (
            'kind = "local"',
            'kind = "slurm"\noptions = ["--partition", "gpu"]',
            r"scheduler\.options must have one option per string, such as --time=2:00:00, got 'gpu'",
        ),
        (
            'kind = "local"',
            'kind = "slurm"\n[scheduler.processes."engine-*"]\nsrun_options = ["-N2"]',
            r"scheduler\.srun_options must not contain options .*, got '-N2'",
        ),
        *(
            (
                'kind = "local"',
                f'kind = "slurm"\noptions = ["{option}"]',
                rf"scheduler\.options must not contain options .*, got '{option}'",
            )
            for option in ("--nod=4", "--exp=NONE", "--wra=x", "--job-n=a", "--outp=x", "--gp=1")
        ),
        (
            "world_size = 2",
            "world_size = 2\nnum_nodes = 3",
            r"trainer\.num_nodes must divide world_size, got 3 and 2",
        ),
        (
            'kind = "local"',
            'kind = "local"\noptions = []',
            r"scheduler\.options is not a known key, expected one of \['gpus', 'kind'\]",
        ),
        ('name = "engine-a"', 'name = "a/b"', r"name must not be empty or contain '/', got 'a/b'"),
        (
            'name = "engine-a"',
            'name = "engine-a"\nkind = "vllm"',
            r"engines 'engine-a': port must be > 0 for kind 'vllm', got 0",
        ),
        (
            'name = "engine-a"',
            'name = "engine-a"\ndtipe = "x"',
            r"engines\[0\]\.dtipe is not a known key",
        ),
        ('transport = "cma"', 'transport = "smoke"', r"transport must be one of .* got 'smoke'"),
        ('transport = "cma"', 'replica = "gpu"', r"replica must be one of .*'device'\], got 'gpu'"),
        ("max_new_tokens = 8", "max_new_tokens = 0", r"max_new_tokens must be >= 1, got 0"),
        ("trainer.py", "nowhere.py", r"trainer\.script must be a file, got '.*nowhere\.py'"),
    ],
)
def test_an_error_names_file_key_rule_and_value(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        load_config(write(tmp_path, (old, new)))
    assert str(raised.value).startswith(f"{tmp_path / 'job.toml'}: ")


@pytest.mark.parametrize(
    "given",
    [
        "temperature = 1.0",
        "top_p = 1.0",
        "top_k = -1",
        "ignore_eos = false",
        "stop_token_ids = []",
        'adapter = ""',
        "min_p = 0.0",
        "repetition_penalty = 1.0",
        "min_new_tokens = 0",
        "stop = []",
        'json_schema = ""',
        'regex = ""',
    ],
)
def test_a_sampling_key_may_be_given_with_its_default(tmp_path: Path, given: str) -> None:
    config = load_config(write(tmp_path, ("ignore_eos = true", given)))
    assert config.rollout.sampling == SamplingParams(max_new_tokens=8)


@pytest.mark.parametrize(
    ("sampling", "arguments", "says"),
    [
        (
            'json_schema = "{}"',
            "[]",
            "kind must be vllm or sglang if rollout.sampling sets json_schema, regex, ebnf or choice",
        ),
        (
            'regex = "a+"',
            "[]",
            "kind must be vllm or sglang if rollout.sampling sets json_schema, regex, ebnf or choice",
        ),
        ('stop = ["."]', '["--skip-tokenizer-init"]', "must not contain --skip-tokenizer-init"),
        ("priority = 1", "[]", "kind must be vllm or sglang if rollout.sampling sets priority"),
        (
            "sampling_seed = 3",
            '[]\nkind = "sglang"\nport = 30001',
            "arguments must contain --enable-deterministic-inference if rollout.sampling sets sampling_seed",
        ),
        (
            "priority = 3",
            '["--seed", "1"]\nkind = "vllm"\nport = 30001',
            "must contain --scheduling-policy if rollout.sampling sets priority, got ['--seed', '1']",
        ),
    ],
)
def test_sampling_that_an_engine_cannot_follow_is_refused(
    tmp_path: Path, sampling: str, arguments: str, says: str
) -> None:
    engine = f'name = "other"\narguments = {arguments}\nmodel'
    path = write(tmp_path, ("ignore_eos = true", sampling))
    text = path.read_text()
    path.write_text(text.replace("[[engines]]", f'[[engines]]\n{engine} = "m"\n[[engines]]', 1))
    with pytest.raises(ConfigError) as raised:
        check_job(load_config(path))
    assert says in "\n".join(mistakes_of(raised.value))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('type = "p2p"', 'type = "p2p", relay = "off", relay_chunk_nbytes = 4194304'),
        ('mode = "in_place"', "routers = []"),
        ('kind = "local"', 'kind = "slurm"\noptions = []\nprocesses = {}'),
        ("world_size = 2", 'world_size = 2\npython = ""\nenvironment = {}'),
        ("world_size = 2", "world_size = 16\ndata_parallel_size = 8"),
        ("max_staleness = 1", 'on_abort = "continue"\nworker_arguments = []'),
    ],
)
def test_a_table_may_be_given_its_defaults(tmp_path: Path, old: str, new: str) -> None:
    assert load_config(write(tmp_path, (old, new))).steps == 4


def test_every_setting_of_the_rollout_controller_is_a_key_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = RolloutConfig(
        max_attempts=2,
        attempt_deadline_s=7200.0,
        retry_backoff_s=0.5,
        engine_grace_s=60.0,
        worker_lease_s=30.0,
        worker_grace_s=90.0,
        on_abort=OnAbort.RETRY,
        carry_partial=True,
        max_rejections=3,
        affinity_slack=2,
        journal=tmp_path / "rollouts",
        acknowledge=True,
        journal_sync_s=2.0,
        journal_compact_nbytes=1 << 20,
    )
    keys = msgspec.to_builtins(wanted, enc_hook=str)
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    config = load_config(write(tmp_path, ("max_staleness = 1", lines)))
    assert config.rollout.limits() == wanted
    recipe = load_recipe(Path(config.recipe.file), config.recipe.name)
    given: list[RolloutConfig] = []

    def controller(*, rollout_config: RolloutConfig, **settings: Any) -> Controller:
        given.append(rollout_config)
        return Controller(rollout_config=rollout_config, **settings)

    monkeypatch.setattr(launch, "Controller", controller)
    launch.Job(config, tmp_path, recipe, IdleScheduler(), "token", print, Progress())
    assert given == [wanted]


def test_workers_may_have_their_own_interpreter(tmp_path: Path) -> None:
    changes = ("max_staleness = 1", 'python = "/opt/other/bin/python"')
    ((worker,), _, _) = job_processes(load_config(write(tmp_path, changes)), "http://10.0.0.1:1")[
        -1
    ]
    assert worker.command[0] == "/opt/other/bin/python"


BAD = Path(__file__).with_name("bad_jobs")


@pytest.mark.parametrize("path", sorted(BAD.glob("*.toml")), ids=lambda path: path.stem)
def test_check_names_the_key_of_a_bad_job(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the output with the first line of each file; all files are changed copies of `good.toml`."""
    says = path.read_text().splitlines()[0].removeprefix("# says: ")
    status = main(["launch", str(path), "--check"])
    printed = capsys.readouterr()
    if path.stem == "good":
        assert (status, printed.err) == (0, "")
        assert printed.out.rstrip().endswith(says)
    else:
        assert (status, printed.out) == (2, "")
        assert re.search(rf"{re.escape(str(path))}: {says}", printed.err)


def test_a_recipe_must_be_a_recipe_class_of_its_file() -> None:
    says = r"recipe\.name must be .*Recipe class in recipe\.py, got 'Sequence'; .* are \['CountSevens'\]"
    with pytest.raises(ConfigError, match=says):
        load_recipe(EXAMPLE.with_name("recipe.py"), "Sequence")
    with pytest.raises(ConfigError, match=r"recipe\.file must be a Python file, got 'nowhere\.py'"):
        load_recipe(Path("nowhere.py"), "Recipe")


NOT_A_RECIPE = {
    "import no_such_module_17\n": r"Python can run, got '.*': line 1: ModuleNotFoundError: .*_17'",
    "x = 1\nx +\n": r"Python can run, got '.*recipe\.py': SyntaxError: invalid syntax .*line 2",
    "import sys\nsys.exit(3)\n": r"Python can run, got '.*recipe\.py': line 2: SystemExit: 3",
    "class CountSevens: ...\n": r"recipe\.name must be a .*, got 'CountSevens'; the file's Recipe classes are \[\]",
    "from windlass.jobs import Recipe\nclass CountSevens(Recipe):\n    def tasks(self): ...\n": (
        r"recipe\.name must be a class that defines \['rewards'\], got 'CountSevens', which does not"
    ),
    "from windlass.jobs import Recipe\nclass CountSevens(Recipe):\n    def after_step(self, step, result): ...\n": (
        r"recipe\.name must be a class whose methods \['after_step'\] begin with `async def`, got 'CountSevens'"
    ),
}


@pytest.mark.parametrize("source", NOT_A_RECIPE, ids=[*"imdcah"])
def test_check_runs_the_recipe_file_and_names_its_fault(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.py").write_text(source)
    path = write(tmp_path, (str(EXAMPLE.with_name("recipe.py")), str(tmp_path / "recipe.py")))
    assert main(["launch", str(path), "--check"]) == 2
    printed = capsys.readouterr().err
    assert re.search(rf"job\.toml: .*{NOT_A_RECIPE[source]}", printed), printed
    assert "Traceback" not in printed


def test_a_recipe_that_cannot_be_created_is_refused_with_its_line(tmp_path: Path) -> None:
    body = "class Asks(Recipe):\n    def __init__(self, path): ...\n    tasks = rewards = None\n"
    (tmp_path / "asks.py").write_text(f"from windlass.jobs import Recipe\n{body}")
    with pytest.raises(
        ConfigError, match=r"called without arguments, got 'Asks': TypeError: .*path"
    ):
        load_recipe(tmp_path / "asks.py", "Asks")


def test_a_recipe_imports_modules_next_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "judge_of_answers.py").write_text("SCORE = 7.0\n")
    body = "class Judged(Recipe):\n    tasks = None\n    def rewards(self, group): return [SCORE]\n"
    (tmp_path / "judged.py").write_text(
        f"from judge_of_answers import SCORE\nfrom windlass.jobs import Recipe\n{body}"
    )
    group: RolloutGroup = RolloutGroup(0, (1,), (), None)
    assert load_recipe(tmp_path / "judged.py", "Judged").rewards(group) == [7.0]


VLLM = ('name = "engine-a"', 'name = "engine-a"\nkind = "vllm"\nport = 8000')
LOCAL = 'kind = "local"'
SLURM = (LOCAL, 'kind = "slurm"\nhost = "10.0.0.1"')
REACHED = ("[recipe]", '[controller]\nhost = "0.0.0.0"\nadvertise_host = "10.0.0.1"\n[recipe]')
GPUS = (LOCAL, LOCAL + '\ngpus = ["0", "1", "2"]')
ON_GPUS = ("world_size = 2", "world_size = 2\nnum_gpus = 1")


def check(config: LaunchConfig) -> None:
    """Run the checks that the command makes before it starts processes."""
    check_job(config)
    check_host(config)


def with_arguments(*words: str) -> tuple[str, str]:
    return ('arguments = ["--max-positions", "32"]', f"arguments = {list(words)}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            (VLLM, with_arguments("--enable-sleep-mode")),
            r"engines 'engine-a': --enable-sleep-mode must not be given",
        ),
        ((VLLM, with_arguments("--pp", "two")), r"engine-a': argument --pp.*invalid int .*'two'"),
        ((VLLM, with_arguments("--dp", "0")), r"engine-a': --dp must be 1 or more, got 0"),
        (
            (VLLM, with_arguments("--pp", "2"), GPUS, ("port = 8000", "port = 8000\nnum_gpus = 1")),
            r"engine-a': num_gpus must be 0, or 2 \(one for each rank of the engine\), got 1",
        ),
        (
            (GPUS, ON_GPUS, ('name = "engine-a"', 'name = "engine-a"\ntensor_parallel_size = 2')),
            r"trainer\.num_gpus: trainers and engines must reserve at most 3 GPUs in total, .* got 4",
        ),
        (
            (('name = "engine-a"', 'name = "engine-a"\ncolocate_with = "trainer-2"'),),
            r"colocate_with must be one of \['trainer-0', 'trainer-1'\], got 'trainer-2'",
        ),
        (
            (
                GPUS,
                (
                    'name = "engine-a"',
                    'name = "engine-a"\ncolocate_with = "trainer-1"\nnum_gpus = 1',
                ),
            ),
            r"num_gpus must not be given with colocate_with, got 1",
        ),
        (
            (
                GPUS,
                ON_GPUS,
                (
                    'name = "engine-a"',
                    'name = "engine-a"\ntensor_parallel_size = 2\ncolocate_with = "trainer-1"',
                ),
            ),
            r"leave one GPU for each of the engine's 2 ranks, got 1 reserved GPU from the first GPU of 'trainer-1'",
        ),
        (
            (("world_size = 2", "world_size = 2\nnum_nodes = 2"),),
            r"trainer\.num_nodes must be 1, got 2: the scheduler has only this host",
        ),
        (
            (
                (
                    LOCAL,
                    'kind = "slurm"\nhost = "127.0.0.1"\n[scheduler.processes."engin"]\ngpu_type="a"',
                ),
            ),
            r"scheduler\.processes: each pattern must match a process of the job \(trainer-0, .*worker-0\), got 'engin'",
        ),
        (
            (with_arguments("--no-such-option", "32"),),
            r"engines 'engine-a': unrecognized arguments: --no-such-option 32",
        ),
        (
            (with_arguments("--max-batch", "0"),),
            r"engines 'engine-a': max_batch must be >= 1, got 0",
        ),
        (
            (with_arguments("--max-positions", "8"),),
            r"engine-a': --max-positions must be > 8 \(rollout\.sampling\.max_new_tokens\), .*got 8",
        ),
        (
            (with_arguments(), ("max_new_tokens = 8", "max_new_tokens = 64")),
            r"engine-a': --max-positions must be > 64 .*, got 64",
        ),
        (
            (VLLM, with_arguments("--max-model-len=8")),
            r"engine-a': --max-model-len must be > 8 .*, got 8",
        ),
        (
            ((f'model = "{EXAMPLE.parent}/model.json"', 'model = "/no/model"'),),
            r"engines 'engine-a': model must be an existing checkpoint folder .*, got '/no/model'",
        ),
        (
            ((f'model = "{EXAMPLE.parent}/model.json"', f'model = "{EXAMPLE.parent}"'),),
            r"engines 'engine-a': model must be a checkpoint folder with a config\.json, got ",
        ),
        (
            (("world_size = 2", 'world_size = 2\npython = "/no/python"'),),
            r"trainer\.python must be a program on this host, got '/no/python'",
        ),
        (
            (("max_staleness = 1", 'python = "no-python-17"'),),
            r"rollout\.python must be a program on this host, got 'no-python-17'",
        ),
        (
            (('name = "engine-a"', 'name = "engine-a"\npython = "/no/python"'),),
            r"engines 'engine-a': python must be a program on this host, got '/no/python'",
        ),
        (
            (VLLM, ("[recipe]", "[controller]\nport = 8000\n[recipe]")),
            r"engines 'engine-a': port must differ from the port of the controller on the same host, got 8000",
        ),
        (
            (SLURM, ('transport = "cma"', 'transport = "auto"')),
            r"controller\.advertise_host must be an address that the nodes can reach, got '127\.0\.0\.1'",
        ),
        (
            (SLURM, REACHED),
            r"transport must be auto, mooncake or nixl, got 'cma': the scheduler has several hosts",
        ),
        (
            ((LOCAL, 'kind = "ray"\naddress = "10.0.0.1:6379"'), REACHED),
            r"transport must be auto, .*, got 'cma'",
        ),
    ],
)
def test_check_refuses_a_job_that_cannot_start(
    tmp_path: Path, changes: tuple[tuple[str, str], ...], says: str
) -> None:
    config = load_config(write(tmp_path, *changes))
    with pytest.raises(ConfigError, match=says):
        check(config)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ((LOCAL, 'kind = "slurm"\nhost = "127.0.0.1"'),),
        ((LOCAL, 'kind = "ray"'),),
        (SLURM, REACHED, ('transport = "cma"', 'transport = "mooncake"')),
        # The engine's one rank gets the third GPU.
        (GPUS, ON_GPUS),
        (GPUS, ON_GPUS, ('name = "engine-a"', 'name = "engine-a"\ncolocate_with = "trainer-1"')),
        (VLLM, with_arguments("--pp", "2", "--max-model-len", "64")),
    ],
)
def test_check_accepts_a_job_that_can_start(
    tmp_path: Path, changes: tuple[tuple[str, str], ...]
) -> None:
    check(load_config(write(tmp_path, *changes)))


def test_an_engine_over_two_nodes_has_one_reservation_and_a_part_on_each_node() -> None:
    config = load_config(EXAMPLE.with_name("slurm-32-hosts.toml"))
    parts, _, _ = job_processes(config, "http://10.0.0.1:1")[0]
    first, second = parts
    assert (first.name, second.name) == ("engine-0", "engine-0-node-1")
    assert (first.colocate_with, second.colocate_with) == ("", "engine-0")
    assert [(part.num_nodes, part.node, part.num_gpus) for part in parts] == [(2, 0, 8), (2, 1, 8)]
    for node, part in enumerate(parts):
        assert part.command[-4:] == ("--nnodes", "2", "--node-rank", str(node))
        assert part.gpus == ()


def test_an_engine_kind_without_parts_must_be_on_one_node(tmp_path: Path) -> None:
    changes = SLURM, REACHED, ('name = "engine-a"', 'name = "engine-a"\nnum_nodes = 2')
    config = load_config(write(tmp_path, *changes))
    with pytest.raises(ConfigError, match=r"num_nodes must be 1 for kind 'embedded', got 2"):
        check_job(config)


TRAINING = '[training]\nmodel = "{here}/m"\nloss = "gspo"\nclip_high = 1e-3\n'


def test_a_table_training_takes_the_place_of_a_script(tmp_path: Path) -> None:
    script = ('script = "', '# "')
    sampling = ("max_new_tokens = 8, ignore_eos = true", "max_new_tokens = 8")
    arguments = ("arguments = [", "# [")
    path = write(tmp_path, script, arguments, ("[rollout]", f"{TRAINING}\n[rollout]"), sampling)
    config = load_config(path)
    assert config.training is not None
    loss = config.training.loss_config()
    assert (loss.level.value, loss.clip_low, loss.clip_high) == ("sequence", 3e-4, 1e-3)
    with pytest.raises(ConfigError, match=r"training.model must be a checkpoint folder with a co"):
        check_host(config)
    for wrong, says in [
        (("# [", "#"), None),
        (('loss = "gspo"', 'loss = "x"'), "training.loss must be one of ['ppo', 'grpo', "),
        (("clip_high = 1e-3", "clip_hi = 1"), "training.clip_hi is not a known key, expected one"),
        (("max_new_tokens = 8", "max_new_tokens = 8, top_k = 5"), "rollout.sampling.top_k must be"),
        (
            ("[trainer]", f'[trainer]\nscript = "{path}"'),
            "either trainer.script or a table [training], got both",
        ),
    ]:
        text = path.read_text()
        assert wrong[0] in text
        other = tmp_path / "other.toml"
        other.write_text(text.replace(*wrong))
        if says is None:
            load_config(other)
            continue
        with pytest.raises(ConfigError) as refused:
            load_config(other)
        assert says in "\n".join(mistakes_of(refused.value))
