"""Configuration of `windlass launch`: a TOML file, read into frozen structs."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import inspect

from windlass.config import ControlConfig, ReplicaPlace, check_numbers, take_name
from windlass.control.backend import backend_of
from windlass.engines.spec import ENGINES
from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.jobs.data import DataSection
from windlass.jobs.foreign_keys import translated
from windlass.jobs.metric_logs import LogSection
from windlass.jobs.schedulers.configs import KnownScheduler
from windlass.jobs.schedulers.local import LocalSchedulerConfig
from windlass.jobs.training import TrainingSection
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.reward_server import ServerRewards
from windlass.rollout.rewards import ProcessRewards
from windlass.rollout.staleness import OnStale
from windlass.sampling import SamplingParams
from windlass.transports.registry import parse_transport

HERE = "{here}"
"""Text that a job file may contain in its values; it stands for the folder of the file."""


class RecipeSection(msgspec.Struct, frozen=True, kw_only=True):
    """Location of the recipe, the user's code that runs in the controller's process.

    Attributes:
        file: Python file.
        name: subclass of `Recipe` in the file; the job creates an object without arguments.
        hook_deadline_s: seconds for each call of the hooks `before_step`, `after_step` and `ended`; 0 for no deadline.
    """

    file: str
    name: str = "Recipe"
    hook_deadline_s: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, {"hook_deadline_s": 0.0}, where="recipe.")


class ControllerSection(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the controller.

    Attributes:
        host: address to bind.
        port: port to bind; 0 lets the operating system choose.
        advertise_host: address that trainers, engines and workers connect to; empty for `host`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""


class TrainerSection(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the trainer ranks.

    Attributes:
        script: script that calls `run_train_worker`; empty for the stock trainer. arguments: arguments of the script.
        world_size: number of ranks.
        num_cpus, num_gpus: number of cores and GPUs reserved per rank.
        data_parallel_size: number of data-parallel ranks; 0 for `world_size`. All tensor- and pipeline-parallel ranks
            of one data-parallel rank get the same samples. A step needs at least one group per data-parallel rank.
        num_nodes: number of nodes, with the same number of ranks on each node; the job gets all nodes in one
            reservation.
        python: interpreter of the ranks; empty for the interpreter of this process.
        environment: variables added to the environment of every rank.
        allow_unused: value of WINDLASS_ALLOW_UNUSED in the ranks, see `allow_unused` of `connect_trainer`.
        step_deadline_s: deadline of one optimiser step.
        publish_deadline_s: deadline of one weight update.
        save_every: steps between checkpoints in `output_dir/checkpoints`; 0 for none.
        keep: number of newest checkpoints to keep after each save; 0 for all.
        max_restarts: largest number of restarts of the ranks between two checkpoints. If a rank dies, hangs or raises,
            the job starts all ranks again from its newest checkpoint. The job fails instead if it has no checkpoint, or
            if the ranks have been restarted this many times.
        resume_from: checkpoint folder of another job; this job continues from its steps and its version.
    """

    script: str = ""
    arguments: tuple[str, ...] = ()
    world_size: int = 1
    num_nodes: int = 1
    num_cpus: int = 1
    num_gpus: int = 0
    data_parallel_size: int = 0
    python: str = ""
    environment: Mapping[str, str] = {}
    allow_unused: tuple[str, ...] = ()
    step_deadline_s: float = 600.0
    publish_deadline_s: float = 600.0
    save_every: int = 0
    keep: int = 0
    max_restarts: int = 3
    resume_from: str = ""

    def __post_init__(self) -> None:
        least = {"world_size": 1, "num_nodes": 1, "num_cpus": 1, "num_gpus": 0, "save_every": 0}
        least |= {"max_restarts": 0, "data_parallel_size": 0, "keep": 0}
        check_numbers(self, least, ("step_deadline_s", "publish_deadline_s"), where="trainer.")
        if self.world_size % self.num_nodes:
            raise ConfigError(
                f"trainer.num_nodes must divide world_size, got {self.num_nodes} and {self.world_size}"
            )
        if self.data_parallel_size and self.world_size % self.data_parallel_size:
            raise ConfigError(
                f"trainer.data_parallel_size must divide world_size, got {self.data_parallel_size} and "
                f"{self.world_size}"
            )


CHECKPOINT_RECORD = "job.json"
"""Name of the file in a checkpoint's folder that marks the checkpoint as finished."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a finished checkpoint. The job writes it as `job.json` after all ranks have saved into the folder.

    Attributes:
        steps: number of optimiser steps before the checkpoint.
        version: published version of the saved weights.
        recipe: value of `Recipe.state` in msgpack; empty for None.
        tasks: tasks that the recipe yielded and the job did not train on, in msgpack; empty if the recipe has no state.
            Tasks in the journal of rollouts are not repeated here.
        journal: id of the journal of rollouts; empty for none.
        num_groups: number of groups that were submitted with the journal before the checkpoint.
        trained: one rollout id of each group that was trained on since the previous checkpoint. If the job was killed
            before it removed these groups from the journal, the job that continues removes them.
        evaluation_due: whether the job that continues must first evaluate the saved weights, because the evaluation after
            these steps had not ended.
    """

    steps: int
    version: int
    recipe: bytes = b""
    tasks: bytes = b""
    journal: str = ""
    num_groups: int = 0
    trained: tuple[str, ...] = ()
    evaluation_due: bool = False


def read_checkpoint(folder: str) -> Checkpoint:
    """Read the record of a finished checkpoint.

    Raises:
        ConfigError: there is no such folder, or it contains no finished checkpoint.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"trainer.resume_from must be a folder, got {folder!r}")
    try:
        return msgspec.json.decode((Path(folder) / CHECKPOINT_RECORD).read_bytes(), type=Checkpoint)
    except (OSError, *DECODE_ERRORS) as error:
        raise ConfigError(
            f"trainer.resume_from must be the folder of a finished checkpoint, with {CHECKPOINT_RECORD}, "
            f"got {folder!r}: {error}"
        ) from error


class Resume(StrEnum):
    """Use of the checkpoints in a job's output folder.

    NEVER: refuse a folder with the output of an earlier job.
    AUTO: continue from the newest checkpoint; start from step 0 if there is no checkpoint.
    """

    NEVER = "never"
    AUTO = "auto"


class EngineSection(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout engine.

    Attributes:
        name: name of the engine in the fleet.
        kind: name in `windlass.engines.spec.ENGINES`. model: configuration or checkpoint folder.
        tensor_parallel_size: number of tensor-parallel ranks.
        port: port of the engine's server; 0 lets the operating system choose, for kinds that support this. An engine
            on several nodes also uses up to ten of the next port numbers, on its first node.
        num_nodes: number of nodes, with one process of the engine's server on each node; the job gets all nodes in one
            reservation.
        arguments: arguments of the engine's launcher.
        python: interpreter of the engine; empty for the interpreter of this process.
        environment: variables added to the engine's environment. num_cpus: number of cores reserved on each node.
        num_gpus: number of GPUs reserved on all nodes together, the same number on each node. By default, the engine
            gets one GPU per engine rank if the trainers have GPUs, and otherwise none.
        colocate_with: name of a trainer rank, such as `trainer-0`. With this setting, the engine reserves no cores and
            GPUs. It runs on the trainer rank's node and cores, and uses one GPU per engine rank, starting at the trainer
            rank's first GPU.
        max_restarts: largest number of restarts of the engine between two steps, after it died or stopped answering;
            the job fails if the engine does so once more.
    """

    name: str
    model: str
    kind: str = "embedded"
    tensor_parallel_size: int = 1
    port: int = 0
    num_nodes: int = 1
    arguments: tuple[str, ...] = ()
    python: str = ""
    environment: Mapping[str, str] = {}
    num_cpus: int = 1
    num_gpus: int | None = None
    colocate_with: str = ""
    max_restarts: int = 3

    def __post_init__(self) -> None:
        where = f"engines {self.name!r}"
        least = {"tensor_parallel_size": 1, "num_nodes": 1, "max_restarts": 0}
        check_numbers(self, least, where=f"{where}: ")
        if not self.name or "/" in self.name:
            raise ConfigError(f"engines: name must not be empty or contain '/', got {self.name!r}")
        if ENGINES.find(self.kind).needs_port and not self.port:
            raise ConfigError(f"{where}: port must be > 0 for kind {self.kind!r}, got 0")


class RolloutSection(RolloutConfig, frozen=True, kw_only=True):
    """Settings of rollouts, including those of `RolloutConfig`.

    Attributes:
        acknowledge: always true: with a journal, a group stays in the journal until a checkpoint contains its step. A job
            without checkpoints acknowledges a group after its step.
        sampling: sampling parameters of every prompt.
        groups_per_step: number of prompts or tasks that one step trains on.
        samples_per_group: number of answers per prompt or task.
        extra_samples: number of answers per prompt or task that are generated in addition. The first `samples_per_group`
            finished ones are used, and the others are cancelled.
        min_samples: smallest number of remaining answers with which a step uses a group. Other answers may have failed, may
            have been rejected too often, or may be too old. 0 for `samples_per_group`.
        max_staleness: largest difference between the trainer's version and the version of an answer's oldest token.
        on_stale: treatment of answers above `max_staleness`. max_resubmits: limit for `OnStale.RESUBMIT`.
        max_concurrent: number of samples that may run at a time.
        num_workers: number of worker processes; 0 runs rollouts in the controller's event loop.
        worker_script: script that calls `run_rollout_worker`; empty for the default worker.
        worker_arguments: arguments added to the worker's command line.
        tokenizer: folder of the model's tokenizer, for prompts of text and messages; empty for none.
        python: interpreter of the worker processes; empty for the interpreter of this process.
        max_worker_restarts: largest number of restarts of each worker between two steps, after it died or stopped
            answering; the job fails if the worker does so once more.
        batch_deadline_s: seconds to wait for the groups of one step, including new groups in place of declined ones.
            The recipe has the same number of seconds to score one group.
        rewards_at_once: number of groups that the recipe scores at a time, each in a thread.
        max_failed_rewards: largest share of the newest rollouts that `[rewards]` may fail to score at the first attempt. If
            more fail, the job ends with an error. The job checks the share after 64 scores, or after twice the rollouts
            of a step if this is more. 1 for no limit.
    """

    _where: ClassVar[str] = "rollout."

    acknowledge: bool = True
    sampling: SamplingParams
    groups_per_step: int
    samples_per_group: int
    extra_samples: int = 0
    min_samples: int = 0
    max_staleness: int = 1
    on_stale: OnStale = OnStale.RESUBMIT
    max_resubmits: int = 3
    max_concurrent: int = 256
    num_workers: int = 1
    worker_script: str = ""
    worker_arguments: tuple[str, ...] = ()
    tokenizer: str = ""
    python: str = ""
    max_worker_restarts: int = 3
    batch_deadline_s: float = 600.0
    rewards_at_once: int = 16
    max_failed_rewards: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("groups_per_step", "samples_per_group", "max_concurrent", "rewards_at_once")
        one = dict.fromkeys(counts, 1)
        none = dict.fromkeys(
            ("max_staleness", "max_resubmits", "num_workers", "max_worker_restarts"), 0
        )
        none |= {"extra_samples": 0, "min_samples": 0}
        above = ("batch_deadline_s", "max_failed_rewards")
        check_numbers(self, one | none, above, where="rollout.")
        if self.max_failed_rewards > 1:
            raise ConfigError(
                f"rollout.max_failed_rewards must be a fraction <= 1, got {self.max_failed_rewards!r}"
            )
        if self.min_samples > self.samples_per_group:
            raise ConfigError(
                f"rollout.min_samples must be <= {self.samples_per_group} (samples_per_group), got {self.min_samples}"
            )

    def _check_acknowledge(self) -> None:
        """Raise `ConfigError` if `acknowledge` is false: a job that is killed would lose the groups of a running step."""
        if not self.acknowledge:
            raise ConfigError(
                "rollout.acknowledge must be true in a job, got false; leave the key out: the job itself acknowledges a "
                "group when a checkpoint contains its step"
            )

    def limits(self) -> RolloutConfig:
        """Return only the settings that `RolloutConfig` defines, for the rollout controller."""
        found = {name: getattr(self, name) for name in RolloutConfig.__struct_fields__}
        return RolloutConfig(**{**found, "acknowledge": self.journal is not None})


class EvaluationSection(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of evaluations.

    Attributes:
        every: number of steps between two evaluations; 0 for none.
        sampling: sampling parameters; if missing, `rollout.sampling` with temperature 0.
        samples_per_task: number of answers per task.
        max_concurrent: number of samples that may run at a time.
        deadline_s: seconds for the answers to all tasks of an evaluation.
    """

    every: int = 0
    sampling: SamplingParams | None = None
    samples_per_task: int = 1
    max_concurrent: int = 64
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        least = {"every": 0, "samples_per_task": 1, "max_concurrent": 1}
        check_numbers(self, least, ("deadline_s",), where="evaluation.")

    def sampling_of(self, training: SamplingParams) -> SamplingParams:
        """Return the sampling parameters of evaluations: `sampling` if set, otherwise `training` at temperature 0."""
        return self.sampling or msgspec.structs.replace(training, temperature=0.0)


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a job.

    Attributes:
        steps: number of optimiser steps; the job publishes a version after each.
        output_dir: folder of logs, checkpoints, `metrics.jsonl`, `summary.json` and `report.html`.
        training: settings of the stock trainer, which runs in place of a trainer's script.
        data: data set of a `DatasetRecipe`.
        log: additional destinations of metrics.
        resume: whether the job continues from checkpoints in `output_dir`.
        audit: whether to record the samples that each version was trained on, in `output_dir/audit.sqlite3`.
        rewards: the function or the server that scores rollouts; None if `Recipe.rewards` scores them.
        transport: transport of trainers and engines; trainers read the name from WINDLASS_TRANSPORT.
        replica: name of a `ReplicaPlace`; `connect_trainer` reads the name from WINDLASS_REPLICA.
        update: mode, backend and deadlines of updates, see `windlass.ControlConfig`.
        environment: variables added to the environment of every process.
        start_deadline_s: seconds from the start of the job until all processes must have connected.
        max_silence_s: seconds without an answer after which the job ends a running engine or rollout worker and starts
            it again.
        shutdown_s: seconds that a running step or update has to end after SIGTERM or SIGINT. Cancelled workflows then get
            the same time to clean up.
    """

    steps: int
    recipe: RecipeSection
    trainer: TrainerSection = TrainerSection()
    training: TrainingSection | None = None
    data: DataSection | None = None
    log: LogSection = LogSection()
    engines: tuple[EngineSection, ...]
    rollout: RolloutSection
    rewards: ProcessRewards | ServerRewards | None = None
    evaluation: EvaluationSection = EvaluationSection()
    output_dir: str
    resume: Resume = Resume.NEVER
    audit: bool = False
    transport: str = "auto"
    replica: str = ReplicaPlace.OFF.value
    scheduler: KnownScheduler = LocalSchedulerConfig()
    controller: ControllerSection = ControllerSection()
    update: ControlConfig = ControlConfig()
    environment: Mapping[str, str] = {}
    start_deadline_s: float = 600.0
    max_silence_s: float = 60.0
    shutdown_s: float = 60.0

    def __post_init__(self) -> None:
        above = ("start_deadline_s", "max_silence_s", "shutdown_s")
        check_numbers(self, {"steps": 1}, above, where="job: ")
        if bool(self.trainer.script) == (self.training is not None):
            got = "both" if self.trainer.script else "neither"
            raise ConfigError(
                f"trainer.script: the job file must have either trainer.script or a table [training], got {got}"
            )
        if self.training is not None:
            self.training.check_sampling(self.rollout.sampling)
        names = [engine.name for engine in self.engines]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"engines must have at least one entry, and each entry a different name, got names {names}"
            )
        size = self.trainer.data_parallel_size or self.trainer.world_size
        if self.rollout.groups_per_step < size:
            raise ConfigError(
                f"rollout.groups_per_step must be >= {size}, a group for each data-parallel rank, got "
                f"{self.rollout.groups_per_step}; set trainer.data_parallel_size if several ranks get the same samples"
            )
        parse_transport(self.transport)
        place = take_name("replica", self.replica, ReplicaPlace)
        if place is not ReplicaPlace.OFF and backend_of(self.update.backend).refuse_replica():
            raise ConfigError(
                f"update.backend must be p2p if replica is {self.replica!r}, got {self.update.backend.name!r}; or set "
                "replica = 'off'"
            )


def load_config(path: Path) -> LaunchConfig:
    """Read and check a job's file. `{here}` in a string is replaced with the path of the file's folder.

    Raises:
        ConfigError: the file is unreadable or not TOML, a key is unknown or missing, a value is not allowed, or a
            script does not exist. The error's text names the file and the first mistake; its notes have the others.
    """
    with name_file(path):
        config, mistakes = read_job(path)
        if config is None or mistakes:
            raise error_of(mistakes)
    return config


def read_job(path: Path) -> tuple[LaunchConfig | None, list[str]]:
    """Read a job file; return the configuration and all mistakes.

    The configuration is None if a required key is missing or a value is not allowed.

    Raises:
        ConfigError: the file is unreadable or not TOML.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(str(error)) from error
    raw = _expand(raw, str(path.resolve().parent))
    # Find unknown keys first, so that a misspelt required key is not reported as missing too.
    unknown = list(_take_unknown("", raw, inspect.type_info(LaunchConfig)))
    mistakes = [said for _, _, said in unknown]
    meant = {
        f"{where}{key}"
        for where, wrong, _ in unknown
        for key in difflib.get_close_matches(wrong, _keys_of(where))
    }
    config, broken = _convert(raw, meant)
    mistakes += broken
    for key in ("recipe.file", "trainer.script", "rollout.worker_script", "rewards.file"):
        section, _, name = key.partition(".")
        table = raw.get(section)
        file = table.get(name) if isinstance(table, dict) else None
        is_optional = key in {"rollout.worker_script", "rewards.file"} or (
            key == "trainer.script" and "training" in raw
        )
        if isinstance(file, str) and not (Path(file).is_file() or (is_optional and not file)):
            mistakes.append(f"{key} must be a file, got {file!r}")
    if config is not None and (resume_from := config.trainer.resume_from):
        try:
            done = read_checkpoint(resume_from).steps
        except ConfigError as error:
            mistakes.append(str(error))
        else:
            if config.steps <= done:
                mistakes.append(
                    f"steps must be > {done}, the steps of the checkpoint in trainer.resume_from, got {config.steps}"
                )
    return config, mistakes


def check_all(checks: Iterable[Callable[[], object]], mistakes: Iterable[str] = ()) -> None:
    """Run all checks, even if some fail, and raise one error with all mistakes.

    Args:
        checks: functions that raise ConfigError for a mistake.
        mistakes: mistakes that earlier checks found.

    Raises:
        ConfigError: a check failed, or `mistakes` is not empty. The error's text is the first mistake; its notes are
            the others.
    """
    found = [*mistakes]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found += mistakes_of(error)
    if found:
        raise error_of(found)


def mistakes_of(error: ConfigError) -> list[str]:
    """Return all mistakes in an error from `error_of`: its text and its notes."""
    return [str(error), *vars(error).get("__notes__", ())]


def error_of(mistakes: Iterable[str]) -> ConfigError:
    """Return one error for all mistakes (at least one): the first is the error's text, the others are its notes."""
    # Two checks may find the same mistake.
    first, *others = dict.fromkeys(mistakes)
    error = ConfigError(first)
    for other in others:
        error.add_note(other)
    return error


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Put the path of the job file before each mistake in a ConfigError that the block raises.

    Raises:
        ConfigError: the block raised ConfigError. The new error has the text and the notes of the old error, each with
            the path.
    """
    try:
        yield
    except ConfigError as error:
        raise error_of(
            f"{path}: {said.removeprefix('job: ')}" for said in mistakes_of(error)
        ) from error


def _convert(raw: dict[str, Any], meant: Collection[str]) -> tuple[LaunchConfig | None, list[str]]:
    """Return the configuration and a list of mistakes; the configuration is None if a value is missing or not allowed.

    msgspec's conversion stops at the first mistake. To find all mistakes, this function copies `raw`, replaces the wrong
    value in the copy with an allowed value, and converts again.

    Args:
        raw: tables of the file; not changed.
        meant: required keys that the file probably contains under a misspelt name.
    """
    mistakes: list[str] = []
    replaced: set[tuple[str | int, ...]] = set()
    current = copy.deepcopy(raw)
    while True:
        try:
            config = msgspec.convert(
                current, type=LaunchConfig, dec_hook=_convert_path, str_keys=True
            )
        except msgspec.ValidationError as error:
            said, place = _explain(error, current), _place_of(error)
            is_missing = "Object missing required field" in str(error)
            if not (is_missing and said.split()[0] in meant):
                mistakes.append(said)
            if place in replaced or not _replace(current, place):
                return None, mistakes
            replaced.add(place)
        else:
            return (None if replaced else config), mistakes


def _place_of(error: msgspec.ValidationError) -> tuple[str | int, ...]:
    """Return the path (keys and indices) to the value that msgspec's error names."""
    rule, _, path = str(error).partition(" - at `")
    steps = re.findall(r"\w+|\[\d+\]", path.rstrip("`").removeprefix("$"))
    place = [int(step[1:-1]) if step.startswith("[") else step for step in steps]
    if lacking := re.fullmatch(r"Object missing required field `(\w+)`", rule):
        return (*place, lacking[1])
    if named := re.search(r"([\w.]+) must", rule):
        keys = named[1].split(".")
        return (*place, keys[-1]) if place else tuple(keys)
    return tuple(place)


def _replace(raw: dict[str, Any], place: tuple[str | int, ...]) -> bool:
    """Replace a wrong value in `raw`, so that the next conversion can find another mistake.

    Remove an optional key, so that the setting gets its default. Give a required key a value that its type allows.

    Args:
        raw: tables of a job file; changed in place.
        place: path of the wrong value, as keys and indices.

    Returns:
        Whether the value was replaced. It was not if `LaunchConfig` lacks the path, if `raw` lacks an optional key, or if
        `_ALLOWED` lacks the type of a required key.
    """
    if not place:
        return False
    *steps, key = place
    table, kind = _without_union(raw, inspect.type_info(LaunchConfig))
    for step in steps:
        wanted = f"[{step}]" if isinstance(step, int) else step
        inner = {name.rstrip("."): (value, each) for name, value, each in _values("", table, kind)}
        if wanted not in inner:
            return False
        table, kind = _without_union(*inner[wanted])
    if not isinstance(kind, inspect.StructType) or not isinstance(table, dict):
        return False
    for field in kind.fields:
        if field.encode_name == key and field.required:
            table[key] = _ALLOWED.get(type(field.type))
            return table[key] is not None
        if field.encode_name == key:
            return table.pop(key, None) is not None
    return False


def _without_union(raw: Any, kind: inspect.Type) -> tuple[Any, inspect.Type]:
    """Return `raw` and its type. If `kind` is a union, use the tag in `raw` to choose one of its types."""
    if isinstance(kind, inspect.UnionType):
        for _, _, member in _values("", raw, kind):
            return raw, member
    return raw, kind


_ALLOWED: Mapping[type[inspect.Type], Any] = {
    inspect.IntType: 1 << 16,
    inspect.FloatType: 1.0,
    inspect.StrType: "x",
}
"""Type -> value that all required keys of this type accept."""


def _keys_of(where: str) -> list[str]:
    """Return the allowed keys of a table. `where` is the table's path, such as `engines[0].`."""
    table = re.sub(r"\[\d+\]", "", where).rstrip(".")
    return [
        key
        for name, keys in _tables("", inspect.type_info(LaunchConfig))
        if name == table
        for key in keys
    ]


def _convert_path(kind: type, value: object) -> object:
    """Convert the text `value` to a `Path`. msgspec calls this for every type without built-in support.

    Raises:
        ValueError: the type is not `Path`, or the value is not text.
    """
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _expand(value: Any, here: str) -> Any:
    """Return `value` with the folder `here` in place of `HERE` in all texts, also in nested lists and tables."""
    if isinstance(value, str):
        return value.replace(HERE, here)
    if isinstance(value, list):
        return [_expand(each, here) for each in value]
    if isinstance(value, dict):
        return {key: _expand(each, here) for key, each in value.items()}
    return value


def _take_unknown(where: str, raw: Any, kind: inspect.Type) -> Iterator[tuple[str, str, str]]:
    """Remove unknown keys from a table of type `kind` and from all tables in it.

    Yields:
        The path of the table, the unknown key, and the error text. The text names all known keys of the table, similar
        keys first.
    """
    if isinstance(kind, inspect.StructType) and isinstance(raw, dict):
        known = {field.encode_name for field in kind.fields}
        known |= {kind.tag_field} if kind.tag_field else set()
        for key in [key for key in raw if key not in known]:
            del raw[key]
            yield where, key, _unknown_key(where, key, sorted(known))
    for place, value, value_kind in _values(where, raw, kind):
        yield from _take_unknown(place, value, value_kind)


def _values(where: str, raw: Any, kind: inspect.Type) -> Iterator[tuple[str, Any, inspect.Type]]:
    """Yield path, value and type of each direct item of a table or a list. Each path ends with a dot.

    Args:
        where: path of the table or list; empty for the whole file, else with a dot at the end.
        raw: the table or list.
        kind: type of `raw`. If this is a union, yield one item: `where`, `raw`, and the type in the union whose tag is in
            `raw`.
    """
    match kind, raw:
        case inspect.StructType(fields=fields), dict():
            for field in fields:
                if (key := field.encode_name) in raw:
                    yield f"{where}{key}.", raw[key], field.type
        case inspect.UnionType(types=kinds), dict():
            # The tag of a table selects its type in the union.
            for each in kinds:
                if isinstance(each, inspect.StructType) and raw.get(each.tag_field) == each.tag:
                    yield where, raw, each
        case inspect.VarTupleType(item_type=item_kind), list():
            for index, item in enumerate(raw):
                yield f"{where.rstrip('.')}[{index}].", item, item_kind
        case inspect.DictType(value_type=value_kind), dict():
            for key, value in raw.items():
                yield f"{where}{key}.", value, value_kind
        case _:
            return


def _all_values(
    where: str, raw: Any, kind: inspect.Type
) -> Iterator[tuple[str, Any, inspect.Type]]:
    """Yield path (without a final dot), value and type of each item of a table or a list, including nested items.

    For arguments see `_values`.
    """
    for place, value, value_kind in _values(where, raw, kind):
        yield place.rstrip("."), value, value_kind
        yield from _all_values(place, value, value_kind)


def _unknown_key(where: str, key: str, known: Sequence[str]) -> str:
    """Return the error text for an unknown key of a table; see `_take_unknown`.

    The text also names other tables that have the key. For a key of TRL or verl, the text also names Windlass's key.
    """
    likely = difflib.get_close_matches(key, known, n=len(known))
    keys = [*likely, *(each for each in known if each not in likely)]
    tables = [
        f"[{table}]" if table else "the top level of the file"
        for table, kind in _tables("", inspect.type_info(LaunchConfig))
        if key in kind and table != re.sub(r"\[\d+\]", "", where).rstrip(".")
    ]
    elsewhere = f"; {key} is a key of {' and of '.join(tables)}" if tables else ""
    if meant := translated(key):
        return f"{where}{key} is not a known key: {meant}{elsewhere}"
    return f"{where}{key} is not a known key, expected one of {keys}{elsewhere}"


def _tables(where: str, kind: inspect.Type) -> Iterator[tuple[str, list[str]]]:
    """Yield the path and the allowed keys of a table of type `kind`, then the same for each table inside it.

    Args:
        where: path of the table; empty for the whole file, else with a dot at the end.
        kind: type of the table, or of a list of tables. The tables of a list have the path of the list.
    """
    match kind:
        case inspect.StructType(fields=fields):
            yield where.rstrip("."), [field.encode_name for field in fields]
            for field in fields:
                yield from _tables(f"{where}{field.encode_name}.", field.type)
        case inspect.VarTupleType(item_type=item_kind):
            yield from _tables(where, item_kind)
        case _:
            return


_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "Path": "a path",
}
"""Name of a type in msgspec's errors -> words for this type in our errors."""


def _explain(error: msgspec.ValidationError, raw: Mapping[str, Any]) -> str:
    """Return Windlass's text for a msgspec error: it names the key, the rule and the wrong value in `raw`."""
    rule, _, place = str(error).partition(" - at `")
    key = place.rstrip("`").removeprefix("$").lstrip(".")
    if lacking := re.fullmatch(r"Object missing required field `(\w+)`", rule):
        return f"{key}{'.' * bool(key)}{lacking[1]} must be given, got none"
    if not key or rule.startswith(re.split(r"[.\[]", key)[0]):
        return rule
    if said := _explain_by_type(rule, key, raw):
        return said
    value: Any = raw
    for part in key.replace("[", ".[").split("."):
        if part.startswith("[") and part[1:-1].isdecimal() and isinstance(value, list):
            value = value[int(part[1:-1])]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return f"{key}: {rule}"
    if isinstance(value, (dict, list)):
        return f"{key}: {rule}"
    if wrong := re.fullmatch(r"Expected `([^`]+)`, got `[^`]+`", rule):
        return f"{key} must be {_KINDS.get(wrong[1], wrong[1])}, got {value!r}"
    return f"{key}: {rule}, got {value!r}"


def _explain_by_type(rule: str, key: str, raw: Mapping[str, Any]) -> str:
    """Return the text for a wrong value of an enumeration, an unknown kind of table, or a list item that must be text.

    Return an empty text for other errors. For arguments see `_explain`.
    """
    for place, found, kind in _all_values("", raw, inspect.type_info(LaunchConfig)):
        if isinstance(kind, inspect.EnumType) and place == key:
            return f"{key} must be one of {[each.value for each in kind.cls]}, got {found!r}"
        is_of_table = key == f"{place.rpartition('.')[0]}[...]"
        if is_of_table and isinstance(kind, inspect.StrType) and not isinstance(found, str):
            return f"{place} must be text, got {found!r}"
        if isinstance(kind, inspect.UnionType) and rule.startswith("Invalid value"):
            tags = [each.tag for each in kind.types if isinstance(each, inspect.StructType)]
            if isinstance(found, dict) and key.startswith(f"{place}."):
                named = found.get(key.removeprefix(f"{place}."))
                return f"{key} must be one of {tags}, got {named!r}"
    return ""
