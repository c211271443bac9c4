"""A refused command changes no file, and reports all mistakes of a job file at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from windlass.cli.main import main
from windlass.jobs.output import OutputFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "launch"


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return the content of every file below a folder, None for a folder. Python's bytecode is omitted."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.fixture
def earlier_demo(tmp_path: Path) -> Path:
    """Provide the output folder of an earlier demo, with the files of a job."""
    folder = tmp_path / "out"
    (folder / "versions").mkdir(parents=True)
    for name in ("job.json", "report.html", "metrics.jsonl", "versions/0.safetensors"):
        (folder / name).write_text("of the demo before")
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--engine", "vllm"), "WINDLASS_VLLM_VENV must name an environment with vllm"),
        (("--engine", "sglang"), "WINDLASS_SGLANG_VENV must name an environment with sglang"),
        (
            ("--model", "{here}/no_model.json"),
            "--model must be a transformers configuration of a causal LM",
        ),
        (
            ("--model", "{here}/no_json.json"),
            "--model must be a transformers configuration of a causal LM",
        ),
        (("--model", "{here}/nowhere.json"), "--model must be a file"),
        (("--json", "{here}/nowhere/demo.json"), "--json must be a file in a folder that exists"),
        (("--max-new-tokens", "13"), r"--max-new-tokens must be in \[1, 12\]"),
    ],
)
def test_a_refused_demo_keeps_the_output_of_the_previous_demo(
    tmp_path: Path,
    earlier_demo: Path,
    options: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "no_model.json").write_text('{"model_type": "qwen3", "num_attention_heads": 0}')
    (tmp_path / "no_json.json").write_text("{")
    for kind in ("VLLM", "SGLANG"):
        monkeypatch.setenv(f"WINDLASS_{kind}_VENV", str(tmp_path / "nothing"))
    before = tree(tmp_path)
    given = [option.replace("{here}", str(tmp_path)) for option in options]
    assert main(["demo", "--output", str(earlier_demo), *given]) == 2
    assert says.replace("\\", "") in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_a_demo_keeps_the_output_of_a_running_demo(
    tmp_path: Path, earlier_demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    with OutputFolder(earlier_demo).locked():
        assert main(["demo", "--output", str(earlier_demo)]) == 2
    assert "must be a folder that no running job uses" in capsys.readouterr().err
    assert tree(tmp_path) == before


def job(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = (EXAMPLE / "job.toml").read_text().replace("{here}/recipe", f"{tmp_path}/recipe")
    text = text.replace("{here}", str(EXAMPLE)).replace("launch-output", str(tmp_path / "out"))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "recipe.py").write_text((EXAMPLE / "recipe.py").read_text())
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("changes", "token_file", "check"),
    [
        ((), "", True),
        ((), "nowhere", False),
        ((('name = "CountSevens"', 'name = "Nobody"'),), "", False),
        ((('name = "CountSevens"', 'name = "Nobody"'),), "", True),
        ((("world_size = 2", "world_size = 2\nnum_gpus = 999"),), "", False),
        ((("steps = 4", "stepz = 4"),), "", False),
    ],
)
def test_a_launch_that_starts_nothing_writes_nothing(
    tmp_path: Path,
    changes: tuple[tuple[str, str], ...],
    token_file: str,
    check: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("WINDLASS_TOKEN", raising=False)
    # An earlier test in this process may have read a token.
    monkeypatch.setattr("windlass.envs.removed_secrets", {})
    if token_file:
        monkeypatch.setenv("WINDLASS_TOKEN_FILE", str(tmp_path / token_file))
    path = job(tmp_path, *changes)
    before = tree(tmp_path)
    status = main(["launch", str(path), *(["--check"] if check else [])])
    assert status == (0 if check and not changes else 2)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("check", [True, False])
def test_all_mistakes_of_a_job_file_are_reported_together(
    tmp_path: Path, check: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job(
        tmp_path,
        ("steps = 4", 'steps = 0\ntransprot = "cma"'),
        ("world_size = 2", 'world_size = "two"\nnum_gpus = -1'),
        ("trainer.py", "nowhere.py"),
        ('name = "engine-a"', 'name = "engine-a"\nmax_restarts = -1\ntensor_parallel_size = 0'),
        ("groups_per_step = 8", "group_per_step = 8"),
        ("max_new_tokens = 8", "max_new_tokens = 0, top_p = 2.0"),
        ('mode = "in_place"', 'mode = "hot"'),
    )
    assert main(["launch", str(path), *(["--check"] if check else [])]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if str(path) in line]
    for mistake in (
        "steps must be >= 1, got 0",
        "transprot is not a known key, expected one of ['transport'",
        "trainer.world_size must be an integer, got 'two'",
        "trainer.num_gpus must be >= 0, got -1",
        "trainer.script must be a file, got",
        "engines 'engine-a': max_restarts must be >= 0, got -1",
        "engines 'engine-a': tensor_parallel_size must be >= 1",
        "rollout.group_per_step is not a known key, expected one of ['groups_per",
        "max_new_tokens must be >= 1, got 0",
        "top_p must be in (0, 1], got 2.0",
        "update.mode must be one of ['in_place', 'staged'], got 'hot'",
    ):
        found = [line for line in said if mistake in line]
        assert len(found) == 1, (mistake, said)
        assert found[0].startswith(f"{path}: ") or f" {path}: " in found[0]
    assert len(said) == 11, said


def test_check_reports_mistakes_of_options_host_and_recipe_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = job(
        tmp_path,
        ("steps = 4", "steps = 4\nstepz = 5"),
        ("world_size = 2", 'world_size = 2\nnum_gpus = 999\npython = "/no/python"'),
        (
            'model.json"\narguments = ["--max-positions"',
            'no_model.json"\narguments = ["--max-posit"',
        ),
        ("[rollout]", '[rollout]\npython = "/no/python-either"'),
        ('name = "CountSevens"', 'name = "Nobody"'),
    )
    assert main(["launch", str(path), "--check"]) == 2
    said = capsys.readouterr().err
    for mistake in (
        "stepz is not a known key",
        "trainer.python must be a program on this host, got '/no/python'",
        "rollout.python must be a program on this host, got '/no/python-either'",
        "engines 'engine-a': model must be an existing checkpoint folder",
        "recipe.name must be a windlass.jobs.Recipe class",
        "engines 'engine-a': ",
    ):
        assert mistake in said
