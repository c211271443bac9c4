"""What the demo refuses before it starts anything."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from windlass.cli.demo import add_arguments, demo_config
from windlass.errors import ConfigError
from windlass.jobs.config import LaunchConfig
from windlass.jobs.demo.run import make_directory, prepare_server


def config(*options: str) -> LaunchConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return demo_config(parser.parse_args(options))


@pytest.mark.parametrize("wrong", [("--transport", "shm"), ("--backend", "disk")])
def test_a_real_engine_takes_one_sided_writes_into_its_own_memory_only(
    wrong: tuple[str, str],
) -> None:
    with pytest.raises(ConfigError, match="--engine vllm goes with --backend p2p"):
        config("--engine", "vllm", *wrong)


def test_the_only_real_engine_must_not_be_killed() -> None:
    with pytest.raises(ConfigError, match="kill_engine_at needs two engines, got 1 sglang"):
        config("--engine", "sglang", "--kill-engine-at", "2")


def test_an_engine_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_SGLANG_VENV", str(tmp_path / "nothing"))
    job = config("--engine", "sglang", "--output", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="WINDLASS_SGLANG_VENV must name an environment"):
        prepare_server(job)


def test_nothing_but_the_output_of_an_earlier_demo_is_deleted(tmp_path: Path) -> None:
    job = config("--output", str(tmp_path / "out"))
    for _ in range(2):  # a new folder, then that of the demo before
        make_directory(job)
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"job.json", "versions"}
        (tmp_path / "out" / "log").write_text("old")
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(
        ConfigError, match=f"an empty one, or that of an earlier .* got {tmp_path}$"
    ):
        make_directory(config("--output", str(tmp_path)))
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"demo: --output .* cannot be made"):
        make_directory(config("--output", str(tmp_path / "thesis.tex")))


def test_an_engine_may_not_be_killed_in_the_last_update() -> None:
    with pytest.raises(ConfigError, match=r"kill_engine_at must be in \[0, steps=4\)"):
        config("--steps", "4", "--kill-engine-at", "4")
    assert config("--steps", "4", "--kill-engine-at", "3").engines[-1].max_restarts == 1


def test_options_change_the_job_of_the_shipped_file(tmp_path: Path) -> None:
    job = config("--mode", "staged", "--backend", "disk", "--output", str(tmp_path), "--seed", "7")
    assert job.update.mode == "staged"
    assert job.update.backend.folder == str(tmp_path / "weights")  # type: ignore[union-attr]
    assert [engine.arguments[-2:] for engine in job.engines] == [("--seed", "7")] * 2
    assert job.trainer.arguments[1:] == (str(tmp_path / "versions"), "7")
