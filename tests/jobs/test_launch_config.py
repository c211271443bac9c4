"""The launch file: what it takes, and what it says to what it does not take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from windlass.cli.main import main
from windlass.config import DiskBackend, UpdateMode
from windlass.errors import ConfigError
from windlass.jobs import load_config
from windlass.jobs.launch import _processes, check_job
from windlass.jobs.recipe import load_recipe
from windlass.jobs.schedulers.slurm import SlurmSchedulerConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch" / "job.toml"


def write(tmp_path: Path, *replacements: tuple[str, str]) -> Path:
    """The example's file, changed, in another folder; `{here}` still means the example's."""
    text = EXAMPLE.read_text().replace("{here}", str(EXAMPLE.parent))
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_the_example_is_valid_and_here_is_its_folder() -> None:
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


def test_a_replica_is_named_beside_the_transport_and_needs_p2p(tmp_path: Path) -> None:
    asked = ('transport = "cma"', 'transport = "cma"\nreplica = "host"')
    assert load_config(write(tmp_path, asked)).replica == "host"
    assert load_config(EXAMPLE).replica == "off"
    with pytest.raises(ConfigError, match=r"backend must be p2p with one, got XcclBackend"):
        load_config(write(tmp_path, asked, ('type = "p2p"', 'type = "xccl"')))


def test_steps_count_those_of_the_checkpoint_that_a_job_goes_on_from(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"steps": 4, "version": 7}')
    resumed = ("world_size = 2", f'world_size = 2\nresume_from = "{tmp_path}"')
    with pytest.raises(ConfigError, match=r"line 4: steps must be > 4, which the checkpoint of"):
        load_config(write(tmp_path, resumed))
    assert load_config(write(tmp_path, resumed, ("steps = 4", "steps = 5"))).steps == 5


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps = 4", "steps = 0", r"job\.toml: line 4: steps must be >= 1, got 0"),
        (
            "world_size = 2",
            'world_size = 2\nresume_from = "/nowhere"',
            r"trainer\.resume_from must be a folder, got '/nowhere'",
        ),
        (
            "world_size = 2",
            f'world_size = 2\nresume_from = "{EXAMPLE.parent}"',
            r"resume_from must be a folder with the job\.json of a checkpoint that was finished",
        ),
        (
            "world_size = 2",
            "world_size = 2\nmax_restarts = -1",
            r"max_restarts must be >= 0, got -1",
        ),
        ("steps = 4", "", r"job\.toml: .*missing required field `steps`"),
        ("steps = 4", "steps = 4 5", r"job\.toml: .*line 4"),
        ("steps = 4", "stepz = 4\nsteps = 4", r"stepz is no known key, expected one of \['contr"),
        (
            "world_size = 2",
            'world_size = "two"',
            r"trainer\.world_size: Expected `int`, got `str`, got 'two'",
        ),
        ("world_size = 2", "world_size = 0", r"trainer\.world_size must be >= 1, got 0"),
        ("world_size = 2", "worldsize = 2", r"trainer\.worldsize is no known key"),
        ('mode = "in_place"', 'mode = "hot"', r"update\.mode: Invalid enum value 'hot', got 'hot'"),
        ('mode = "in_place"', "minengines = 2", r"update\.minengines is no known key"),
        (
            'mode = "in_place"',
            "deadlines = { rite_s = 1.0 }",
            r"update\.deadlines\.rite_s is no known key",
        ),
        (
            'mode = "in_place"',
            "deadlines = { write_s = -1.0 }",
            r"write_s must be > 0, got -1\.0",
        ),
        ('type = "p2p"', 'type = "pigeon"', r"update\.backend\.type: Invalid value 'pigeon'"),
        ('kind = "local"', 'kind = "pbs"', r"scheduler.*: Invalid value 'pbs'"),
        (
            'kind = "local"',
            'kind = "slurm"\noptions = ["--partition", "gpu"]',
            r"scheduler\.options must be one option a string, as --time=2:00:00, got 'gpu'",
        ),
        (
            'kind = "local"',
            'kind = "slurm"\n[scheduler.processes."engine-*"]\nsrun_options = ["-N2"]',
            r"scheduler\.srun_options must leave to the scheduler .*, got '-N2'",
        ),
        *(
            (
                'kind = "local"',
                f'kind = "slurm"\noptions = ["{option}"]',
                rf"scheduler\.options must leave to the scheduler .*, got '{option}'",
            )
            for option in ("--nod=4", "--exp=NONE", "--wra=x", "--job-n=a", "--outp=x", "--gp=1")
        ),
        (
            "world_size = 2",
            "world_size = 2\nnum_nodes = 3",
            r"trainer\.num_nodes must divide world_size, got 3 and 2",
        ),
        ('kind = "local"', 'kind = "local"\noptions = []', r"unknown field `options`"),
        ('name = "engine-a"', 'name = "a/b"', r"name must not be empty or contain '/', got 'a/b'"),
        (
            'name = "engine-a"',
            'name = "engine-a"\nkind = "vllm"',
            r"engines 'engine-a': port must be > 0 for kind 'vllm', got 0",
        ),
        (
            'name = "engine-a"',
            'name = "engine-a"\ndtipe = "x"',
            r"engines\[0\]\.dtipe is no known key",
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


BAD = Path(__file__).with_name("bad_jobs")


@pytest.mark.parametrize("path", sorted(BAD.glob("*.toml")), ids=lambda path: path.stem)
def test_check_says_which_line_of_a_bad_job_to_mend(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line of each file is what must be said of it; `good.toml` is what they were made from."""
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
    with pytest.raises(ConfigError, match=r"recipe\.name must be .*Recipe class, got 'Sequence'"):
        load_recipe(EXAMPLE.with_name("recipe.py"), "Sequence")
    with pytest.raises(ConfigError, match=r"recipe\.file must be a Python file, got 'nowhere\.py'"):
        load_recipe(Path("nowhere.py"), "Recipe")


VLLM = ('name = "engine-a"', 'name = "engine-a"\nkind = "vllm"\nport = 8000')
LOCAL = 'kind = "local"'
SLURM = (LOCAL, 'kind = "slurm"\nhost = "10.0.0.1"')
REACHED = ("[recipe]", '[controller]\nhost = "0.0.0.0"\nadvertise_host = "10.0.0.1"\n[recipe]')
GPUS = (LOCAL, LOCAL + '\ngpus = ["0", "1", "2"]')
ON_GPUS = ("world_size = 2", "world_size = 2\nnum_gpus = 1")


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
            r"engine-a': num_gpus must be 2, one for each of its ranks, got 1",
        ),
        (
            (GPUS, ON_GPUS, ('name = "engine-a"', 'name = "engine-a"\ntensor_parallel_size = 2')),
            r"trainer\.num_gpus: trainers and engines together must ask for at most the 3 GPUs .*, got 4",
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
            r"must name a rank with at least 2 GPUs from its own on, .*, got 'trainer-1' with 1 on its",
        ),
        (
            (("world_size = 2", "world_size = 2\nnum_nodes = 2"),),
            r"trainer\.num_nodes must be 1 where the scheduler has this host alone, got 2",
        ),
        (
            (
                (
                    LOCAL,
                    'kind = "slurm"\nhost = "127.0.0.1"\n[scheduler.processes."engin"]\ngpu_type="a"',
                ),
            ),
            r"scheduler\.processes must fit a process of the job \(trainer-0, .*worker-0\), got 'engin'",
        ),
        (
            (SLURM, ('transport = "cma"', 'transport = "auto"')),
            r"controller\.advertise_host must be an address that the nodes reach, got '127\.0\.0\.1'",
        ),
        (
            (SLURM, REACHED),
            r"transport must be auto, or one that reaches other hosts .*, got 'cma'",
        ),
        (
            ((LOCAL, 'kind = "ray"\naddress = "10.0.0.1:6379"'), REACHED),
            r"transport must be auto, .*, got 'cma'",
        ),
    ],
)
def test_what_a_start_would_be_refused_for_is_refused_before_it(
    tmp_path: Path, changes: tuple[tuple[str, str], ...], says: str
) -> None:
    config = load_config(write(tmp_path, *changes))
    with pytest.raises(ConfigError, match=says):
        check_job(config)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ((LOCAL, 'kind = "slurm"\nhost = "127.0.0.1"'),),
        ((LOCAL, 'kind = "ray"'),),
        (SLURM, REACHED, ('transport = "cma"', 'transport = "mooncake"')),
        (GPUS, ON_GPUS),  # and the engine's one rank gets the third
        (GPUS, ON_GPUS, ('name = "engine-a"', 'name = "engine-a"\ncolocate_with = "trainer-1"')),
        (VLLM, with_arguments("--pp", "2", "--max-model-len", "64")),
    ],
)
def test_what_can_start_is_not_refused(
    tmp_path: Path, changes: tuple[tuple[str, str], ...]
) -> None:
    check_job(load_config(write(tmp_path, *changes)))


def test_an_engine_of_two_nodes_is_one_reservation_with_a_part_of_its_server_on_each() -> None:
    config = load_config(EXAMPLE.with_name("slurm-32-hosts.toml"))
    parts, _, _ = _processes(config, "http://10.0.0.1:1")[0]
    first, second = parts
    assert (first.name, second.name) == ("engine-0", "engine-0-node-1")
    assert (first.colocate_with, second.colocate_with) == ("", "engine-0")
    assert [(part.num_nodes, part.node, part.num_gpus) for part in parts] == [(2, 0, 8), (2, 1, 8)]
    for node, part in enumerate(parts):
        assert part.command[-4:] == ("--nnodes", "2", "--node-rank", str(node))
        assert part.gpus == ()


def test_an_engine_that_has_no_parts_is_on_one_node(tmp_path: Path) -> None:
    changes = SLURM, REACHED, ('name = "engine-a"', 'name = "engine-a"\nnum_nodes = 2')
    config = load_config(write(tmp_path, *changes))
    with pytest.raises(ConfigError, match=r"num_nodes must be 1 for kind 'embedded', got 2"):
        check_job(config)
