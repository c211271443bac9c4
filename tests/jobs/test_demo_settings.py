"""Settings of the demo: refusals before its start, its options, and its list of problems at the end."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from demo_checkpoint import write_checkpoint
from msgspec import structs
from needs import need_package

from windlass.cli.commands.demo import (
    CHECKPOINT_RATE,
    FOLDER,
    MODELS,
    add_arguments,
    demo_config,
)
from windlass.config import DiskBackend, P2pBackend, PauseMode, XcclBackend
from windlass.control.report import Measure, RoundOutcome, UpdateReport
from windlass.engines.options import options_of
from windlass.engines.spec import ENGINES
from windlass.errors import ConfigError
from windlass.jobs.config import LaunchConfig
from windlass.jobs.demo.arithmetic import load_tokenizer, longest_prompt
from windlass.jobs.demo.checker import TornReport
from windlass.jobs.demo.own_transfer import (
    TRANSFERS,
    OwnResult,
    comparison,
    own_config,
    own_transfer_of,
)
from windlass.jobs.demo.recipe import DemoRecipe
from windlass.jobs.demo.run import check_demo, find_problems, make_directory, what_next
from windlass.jobs.demo.trainer import build_model
from windlass.jobs.launch import check_job
from windlass.jobs.results import JobSummary
from windlass.rollout.messages import TrainingSample


@pytest.fixture(autouse=True)
def folder_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to an empty folder: `make demo` leaves its output in the working folder, and another run is refused there."""
    monkeypatch.chdir(tmp_path)


def config(*options: str) -> LaunchConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return demo_config(parser.parse_args(options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ("--transport", "cuda_ipc"),
            r"--transport must be one of .*'auto'\] with --device cpu, got 'cuda_ipc': cuda_ipc writes only memory of GPUs",
        ),
        (
            ("--engine", "vllm", "--transport", "shm"),
            "--transport must not be shm with --engine vllm, because .* use cma or auto",
        ),
    ],
)
def test_transports_that_cannot_write_the_engines_memory_are_refused(
    options: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(*options)


def test_colocated_engines_pull_and_retract() -> None:
    job = config("--colocate")
    assert (job.transport, job.update.pause_mode) == ("pull", PauseMode.RETRACT)
    assert config("--colocate", "--transport", "cma").transport == "cma"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--engine", "vllm"),
            "--colocate with --engine vllm needs --device cuda, got 'cpu': vllm's build for CPUs .* use --engine embedded",
        ),
        (
            ("--engine", "sglang"),
            "--colocate with --engine sglang needs --device cuda, got 'cpu': sglang's build for CPUs",
        ),
        (
            ("--engine", "vllm", "--device", "cuda", "--transport", "cuda_ipc"),
            "--engine vllm needs --backend p2p and --transport pull, got .* 'cuda_ipc': other backends",
        ),
        (
            ("--transport", "shm"),
            "--transport pull or cma, got 'p2p' and 'shm': other backends",
        ),
        (("--backend", "disk"), "needs --backend p2p .* got 'disk'"),
        (("--kill-engine-at", "2"), "--kill-engine-at must be 0 with --colocate, got 2"),
        (("--pause-mode", "in_place"), "--pause-mode must be abort or retract .* got 'in_place'"),
        (
            ("--engine", "vllm", "--device", "cuda", "--pause-mode", "retract"),
            "--pause-mode must be abort with --colocate --engine vllm, got 'retract'",
        ),
    ],
)
def test_options_that_engines_cannot_sleep_with_are_refused(
    options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config("--colocate", *options)


@pytest.mark.parametrize("transport", ["cma", "shm", "pull", "mooncake", "nixl", "auto"])
@pytest.mark.parametrize("engine", ["embedded", "vllm", "sglang"])
def test_every_transport_of_host_memory_is_passed_to_the_job(engine: str, transport: str) -> None:
    if (engine, transport) in {("vllm", "shm"), ("sglang", "shm")}:
        pytest.skip("refused")
    assert config("--engine", engine, "--transport", transport).transport == transport


@pytest.mark.parametrize("engine", ["embedded", "vllm", "sglang"])
def test_every_engine_takes_every_backend(engine: str) -> None:
    found = [
        type(config("--engine", engine, "--backend", backend).update.backend)
        for backend in ("p2p", "xccl", "disk")
    ]
    assert found == [P2pBackend, XcclBackend, DiskBackend]


def test_a_demo_that_kills_a_real_engine_has_a_second_engine() -> None:
    job = config("--engine", "sglang", "--kill-engine-at", "2")
    assert [(e.name, e.max_restarts) for e in job.engines] == [("engine-a", 1), ("engine-b", 1)]
    assert job.engines[0].port != job.engines[1].port


def on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: str, *options: str) -> LaunchConfig:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("WINDLASS_VLLM_VENV", "/venv")
    job = config("--engine", "vllm", "--device", "cuda", *options)
    check_job(job)
    return job


@pytest.mark.parametrize(
    ("gpus", "options", "ranks", "places"),
    [
        ("0", (), 1, ["trainer-0"]),
        ("0", ("--kill-engine-at", "2"), 1, ["trainer-0", "trainer-0"]),
        ("2,3", (), 1, [1]),
        ("2,3", ("--kill-engine-at", "2"), 2, ["trainer-0", "trainer-1"]),
        ("0,1,2,3", ("--kill-engine-at", "2"), 2, [1, 1]),
    ],
)
def test_engines_have_gpus_of_their_own_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
    gpus: str,
    options: tuple[str, ...],
    ranks: int,
    places: list[object],
) -> None:
    job = on_gpus(monkeypatch, gpus, *options)
    assert (job.trainer.world_size, job.trainer.num_gpus) == (ranks, 1)
    assert [engine.num_gpus or engine.colocate_with for engine in job.engines] == places
    assert job.transport == "cuda_ipc"
    assert job.trainer.arguments[3] == "cuda"
    assert "--kv-cache-memory-bytes" in job.engines[0].arguments


@pytest.mark.parametrize(
    ("engine", "option"), [("vllm", "--enable-sleep-mode"), ("sglang", "--enable-memory-saver")]
)
@pytest.mark.parametrize(("gpus", "ranks"), [("0", 1), ("0,1", 2)])
def test_colocated_servers_sleep_on_the_gpus_of_trainers(
    monkeypatch: pytest.MonkeyPatch, engine: str, option: str, gpus: str, ranks: int
) -> None:
    monkeypatch.setenv("WINDLASS_SGLANG_VENV", "/venv")
    job = on_gpus(monkeypatch, gpus, "--engine", engine, "--colocate")
    assert (job.transport, job.trainer.world_size) == ("pull", ranks)
    assert job.update.pause_mode is PauseMode.ABORT
    (section,) = job.engines
    assert section.colocate_with == "trainer-0"
    assert option in section.arguments


@pytest.mark.parametrize(("gpus", "places"), [("0", "trainer-0"), ("0,1", 1)])
def test_an_sglang_server_gets_gpus_like_a_vllm_server(
    monkeypatch: pytest.MonkeyPatch, gpus: str, places: object
) -> None:
    monkeypatch.setenv("WINDLASS_SGLANG_VENV", "/venv")
    job = on_gpus(monkeypatch, gpus, "--engine", "sglang")
    (engine,) = job.engines
    assert (engine.kind, engine.num_gpus or engine.colocate_with) == ("sglang", places)
    assert "cpu" not in engine.arguments
    assert "SGLANG_USE_CPU_ENGINE" not in engine.environment
    assert job.transport == "cuda_ipc"
    assert job.update.pause_mode is PauseMode.ABORT


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        ("", (), "needs a GPU, none is visible"),
        ("0", ("--transport", "cma"), r"--transport must be one of \['cuda_ipc', .*host memory"),
        ("0", ("--backend", "xccl"), "needs more GPUs than engines, .*; use --backend p2p or disk"),
        ("0", ("--engine", "embedded"), "--device must be cpu with --engine embedded"),
        ("0", ("--model", "/nowhere.json"), "--model must be a file, got '/nowhere.json'"),
    ],
)
def test_options_that_do_not_fit_the_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: str, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_gpus(monkeypatch, gpus, *options)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("gpus", "named", "other"),
    [("0", "pip install {}", "make engines"), ("", "make engines", "pip install")],
    ids=["gpu", "cpu"],
)
def test_the_hint_for_a_missing_engine_fits_the_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    gpus: str,
    named: str,
    other: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv(f"WINDLASS_{kind.upper()}_VENV", str(tmp_path / "nothing"))
    job = config("--engine", kind, "--output", str(tmp_path / "out"))
    with pytest.raises(ConfigError) as refusal:
        check_demo(job)
    assert named.format(kind) in str(refusal.value)
    assert other not in str(refusal.value)


def test_an_engine_that_is_not_installed_is_named_before_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_SGLANG_VENV", str(tmp_path / "nothing"))
    job = config("--engine", "sglang", "--output", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="WINDLASS_SGLANG_VENV must name an environment"):
        check_demo(job)


def test_a_transport_whose_package_an_engine_lacks_is_refused_before_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    monkeypatch.setenv("WINDLASS_VLLM_VENV", str(tmp_path / "empty"))
    need_package("nixl")
    with pytest.raises(ConfigError, match=r"--transport nixl needs the package nixl .*/empty/bin/"):
        check_demo(config("--engine", "vllm", "--transport", "nixl"))
    check_demo(config("--engine", "vllm", "--transport", "cma"))


def test_trainer_engine_and_prompts_use_the_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    for engine in ("embedded", "vllm", "sglang"):
        job = config("--engine", engine, "--checkpoint", str(folder))
        assert job.trainer.arguments[0] == str(folder)
        assert float(job.trainer.arguments[4]) == CHECKPOINT_RATE
        assert {each.model for each in job.engines} == {str(folder)}
        longest = longest_prompt(load_tokenizer(folder))
        for each in job.engines:
            context = dict(options_of(each.arguments)).get(ENGINES.find(engine).context_option)
            assert context in {None, str(longest + 8)}
        check_job(job)
    assert config("--learning-rate", "0.5").trainer.arguments[4] == "0.5"


@pytest.mark.parametrize(
    ("left_out", "options", "reason"),
    [
        ("*.safetensors", (), "must be a folder with config.json and safetensors files, got "),
        ("tokenizer*", (), r"must be a folder with a tokenizer of transformers \(tokenizer.json\)"),
        ("", ("--model", "m.json"), "--model must not be given with --checkpoint"),
        ("", ("--max-new-tokens", "255"), "--max-new-tokens must be in .* has 256 tokens, got 255"),
        ("", ("--learning-rate", "0"), "--learning-rate must be above 0 and below 1, got 0.0"),
    ],
)
def test_a_checkpoint_that_the_demo_cannot_use_is_refused(
    tmp_path: Path, left_out: str, options: tuple[str, ...], reason: str
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    for file in folder.glob(left_out) if left_out else ():
        file.unlink()
    with pytest.raises(ConfigError, match=reason):
        config("--checkpoint", str(folder), *options)


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        (
            "NaN",
            r"config.json must be JSON, and max_position_embeddings must be an integer or absent: ",
        ),
        ("1e999", "max_position_embeddings must be an integer or absent: "),
        ('"256"', "max_position_embeddings must be an integer or absent: "),
        ("[", "max_position_embeddings must be an integer or absent: "),
        (
            "0",
            r"--checkpoint must be a model with a context of more than \d+ tokens .*, got 0 tokens in ",
        ),
        (
            "-1",
            r"--checkpoint must be a model with a context of more than \d+ tokens .*, got -1 tokens in ",
        ),
    ],
)
def test_a_checkpoint_with_an_impossible_context_is_refused_by_its_value(
    tmp_path: Path, positions: str, reason: str
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / "config.json").write_text(f'{{"max_position_embeddings": {positions}}}')
    with pytest.raises(ConfigError, match=reason):
        config("--checkpoint", str(folder))


@pytest.mark.parametrize("text", ["{}", '{"max_position_embeddings": null}'])
def test_a_checkpoint_need_not_name_its_context(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / "config.json").write_text(text)
    assert config("--checkpoint", str(folder)).trainer.arguments[0] == str(folder)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "--compare needs --engine vllm or sglang"),
        (
            ("--engine", "vllm", "--kill-engine-at", "2"),
            "--kill-engine-at must be 0 with --compare",
        ),
        (("--engine", "vllm", "--scheduler", "ray"), "--scheduler must be local with --compare"),
    ],
)
def test_a_comparison_that_cannot_run_is_refused(options: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config("--compare", *options)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_compared_job_differs_only_in_places(engine: str, tmp_path: Path) -> None:
    job = config("--engine", engine, "--compare", "--output", str(tmp_path))
    own = own_config(job)
    assert own.output_dir == str(tmp_path / "own")
    assert own.trainer.arguments[1] == str(tmp_path / "own" / "versions")
    assert own.engines[0].port != job.engines[0].port
    assert own.engines[0].model == job.engines[0].model
    changed = structs.replace(
        own, output_dir=job.output_dir, trainer=job.trainer, engines=job.engines
    )
    assert changed == job


@pytest.mark.parametrize(
    ("gpus", "options", "way"),
    [
        ("0,1", ("--device", "cuda"), "nccl"),
        ("0", ("--device", "cuda"), "disk"),
        ("", (), "disk"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_compared_transfer_is_nccl_only_between_gpus(
    monkeypatch: pytest.MonkeyPatch, engine: str, gpus: str, options: tuple[str, ...], way: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find("windlass" if name == engine else name)
    )
    job = config("--engine", engine, "--compare", *options)
    assert own_transfer_of(job) is TRANSFERS[engine, way]


def test_the_comparison_shows_both_jobs() -> None:
    recipe, torn = (
        DemoRecipe(),
        TornReport(checked=1, torn=0, max_distance={}, control_detected=None),
    )
    sample = TrainingSample(
        prompt_ids=(1,), output_ids=(2,), logprobs=(-1.0,), versions=(0,), engine="e", reward=0.0, group_id=0,
    )  # fmt: skip
    for version, seconds in enumerate((9.0, 0.002, 0.004, 0.003)):
        times = {Measure.UPDATE_S.value: seconds, Measure.PAUSE_S.value: seconds / 2}
        recipe.updates.append(update(version, "engine-a", measures=times))
        recipe.clock.updated(seconds, seconds / 2)
        recipe.clock.stepping([sample], version)
    recipe.clock.updated(0.001, 0.001)
    own = OwnResult(
        title="theirs", update_s=(0.05, 0.07, 0.06), pause_s=(0.02, 0.01, 0.03),
        pace=structs.replace(recipe.clock.pace(), samples_per_hour=1234567.0), torn=torn, lost=0,
    )  # fmt: skip
    lines = [line.split("  ") for line in comparison(recipe, own, "ours", 5)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[:3] == [
        ["ours", "theirs"],
        ["update, median", "3.0 ms", "60.0 ms"],
        ["pause, median", "1.5 ms", "20.0 ms"],
    ]
    assert cells[3][0] == "samples per hour"
    assert cells[3][2] == "1,234,567"
    assert cells[4] == ["torn answers", "5", "0"]


def test_an_old_sglang_pauses_by_abort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.18 labels an answer with one version; 0.5.19 labels every token."""
    venv.create(tmp_path / "env", with_pip=False)
    monkeypatch.setenv("WINDLASS_SGLANG_VENV", str(tmp_path / "env"))
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    info = site / "sglang-1.dist-info"
    info.mkdir()
    keeping = config("--engine", "sglang", "--pause-mode", "in_place")
    for version in ("0.5.18", "0.5.19"):
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        check_demo(config("--engine", "sglang"))
        if version == "0.5.19":
            check_demo(keeping)
            continue
        with pytest.raises(ConfigError, match=r"--pause-mode must be abort with SGLang 0.5.18"):
            check_demo(keeping)


def test_copies_of_versions_that_do_not_fit_the_disk_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = config("--steps", "5")
    numel = sum(p.numel() for p in build_model(FOLDER / MODELS["cpu"]).parameters())
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20 * numel))
    check_demo(job)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20 * numel - 1))
    with pytest.raises(
        ConfigError,
        match=r"must have .* GB free, got .* the weights of 5 versions; use fewer --steps",
    ):
        check_demo(job)


def test_a_megatron_trainer_is_another_script_of_the_same_job() -> None:
    fsdp, megatron = config(), config("--trainer", "megatron")
    assert Path(megatron.trainer.script).name == "megatron_trainer.py"
    assert Path(megatron.trainer.script).exists()
    assert structs.replace(megatron, trainer=fsdp.trainer) == fsdp


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_type": "mistral"}, r"model_type must be one of \['llama', 'qwen2', 'qwen3'\]"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type must be 'default', got 'linear'",
        ),
    ],
)
def test_models_that_megatron_cannot_train_are_refused(
    tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    need_package("megatron")
    model = json.loads((FOLDER / MODELS["cpu"]).read_text())
    (tmp_path / "model.json").write_text(json.dumps({**model, **changed}))
    job = config("--trainer", "megatron", "--model", str(tmp_path / "model.json"))
    with pytest.raises(
        ConfigError,
        match=f"--trainer megatron cannot train this model: {reason}.*; use --trainer",
    ):
        check_demo(job)
    check_demo(config("--model", str(tmp_path / "model.json")))


def test_a_megatron_trainer_without_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "megatron" else find(name)
    )
    with pytest.raises(ConfigError, match=r"--trainer megatron needs Megatron-core: `pip install"):
        check_demo(config("--trainer", "megatron"))


def test_a_demo_deletes_only_the_output_of_an_earlier_demo(tmp_path: Path) -> None:
    job = config("--output", str(tmp_path / "out"))
    # The first turn makes a new folder. The second finds the folder of an earlier demo.
    for _ in range(2):
        make_directory(job)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"job.json", "versions"}
        (tmp_path / "out" / "log").write_text("old")
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(
        ConfigError, match=f"an empty folder, or the folder of an earlier demo, got {tmp_path}: "
    ):
        make_directory(config("--output", str(tmp_path)))
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"demo: --output .* cannot be used"):
        make_directory(config("--output", str(tmp_path / "thesis.tex")))


@pytest.mark.parametrize(("engine", "room"), [("embedded", 12), ("vllm", 60)])
def test_answers_are_as_long_as_the_engines_settings_allow(engine: str, room: int) -> None:
    allowed = config("--engine", engine, "--max-new-tokens", str(room))
    assert allowed.rollout.sampling.max_new_tokens == room
    for wrong in (0, room + 1):
        with pytest.raises(
            ConfigError, match=rf"--max-new-tokens must be in \[1, {room}\] .* {wrong}"
        ):
            config("--engine", engine, "--max-new-tokens", str(wrong))


def test_an_engine_may_not_be_killed_in_the_last_update() -> None:
    with pytest.raises(ConfigError, match=r"--kill-engine-at must be in \[0, steps=4\)"):
        config("--steps", "4", "--kill-engine-at", "4")
    assert config("--steps", "4", "--kill-engine-at", "3").engines[-1].max_restarts == 1


def test_options_change_the_job_of_the_shipped_file(tmp_path: Path) -> None:
    job = config("--mode", "staged", "--backend", "disk", "--output", str(tmp_path), "--seed", "7")
    assert job.update.mode == "staged"
    assert job.update.backend.folder == str(tmp_path / "weights")  # type: ignore[union-attr]
    assert [engine.arguments[-2:] for engine in job.engines] == [("--seed", "7")] * 2
    assert job.trainer.arguments[1:] == (str(tmp_path / "versions"), "7", "cpu", "0")


def update(version: int, *engines: str, **changed: object) -> UpdateReport:
    report = UpdateReport(
        version=version,
        outcome=RoundOutcome.PUBLISHED,
        reason="",
        engines=engines,
        left_out={},
        phase_s={},
        digest_ok=True,
        measures={measure.value: 1.0 for measure in Measure},
    )
    return structs.replace(report, **changed)


def test_a_demo_reports_every_wrong_result_as_a_problem() -> None:
    job, recipe = config(), DemoRecipe()
    clean = TornReport(checked=1, torn=0, max_distance={}, control_detected=None)
    summary = JobSummary(
        steps=1, version=1, trainer_restarts=0, stopped_by=0, outcomes=(), rollouts={"lost": 0}
    )
    recipe.rewards_by_step = [0.1] * 6 + [0.2] * 6
    recipe.updates = [update(0, "engine-a"), update(1, "engine-b", "engine-a")]
    assert find_problems(job, recipe, summary, clean) == []
    recipe.rewards_by_step.reverse()
    recipe.updates = [
        update(0, digest_ok=False),
        update(1, outcome=RoundOutcome.ABORTED, reason="why"),
        update(1, "engine-a"),
    ]
    found = find_problems(
        job, recipe, structs.replace(summary, rollouts={"lost": 2}), structs.replace(clean, torn=3)
    )
    assert found[:5] == [
        "torn answers: 3",
        "lost rollouts: 2",
        "digest of version 0 differs",
        "version 1: aborted: why",
        "engine-b does not serve the last version",
    ]
    assert found[5].startswith("reward did not rise: first third [0.2")


def test_the_next_commands_work_outside_the_active_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` creates the environment but does not add it to the PATH."""
    job = config("--output", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    said = [line.split()[0] for line in what_next(job, []) if "windlass " in line]
    assert len(said) == 4
    for program in said:
        assert subprocess.check_output([program, "--version"], text=True).startswith("windlass ")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert "  windlass doctor\n" in "\n".join(what_next(job, []))


def test_the_next_commands_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(
        sys, "executable", str(Path.cwd().parent / "another-checkout/.venv/bin/python")
    )
    lines = "\n".join(what_next(config(), [])).splitlines()
    assert "  demo-output/report.html" in lines
    assert max(map(len, lines)) <= 80
