"""What the demo refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.errors import ConfigError
from windlass.jobs.demo.real_engines import prepare_real_engine
from windlass.jobs.demo.settings import (
    DemoSettings,
    make_directory,
    real_engine_settings,
    save_settings,
)


@pytest.mark.parametrize("wrong", [{"transport": "shm"}, {"backend": "disk"}])
def test_a_real_engine_takes_one_sided_writes_into_its_own_memory_only(
    wrong: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match="--engine vllm goes with --backend p2p"):
        DemoSettings(engine="vllm", **wrong)  # type: ignore[arg-type]


def test_the_only_real_engine_must_not_be_killed() -> None:
    with pytest.raises(ConfigError, match="kill_engine_at needs two engines, got 1 sglang"):
        real_engine_settings(DemoSettings(engine="sglang", kill_engine_at=2))


def test_an_engine_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_SGLANG_VENV", str(tmp_path / "nothing"))
    settings = real_engine_settings(DemoSettings(engine="sglang", output_dir=str(tmp_path / "out")))
    save_settings(settings)
    with pytest.raises(ConfigError, match="WINDLASS_SGLANG_VENV must name an environment"):
        prepare_real_engine(settings)


def test_nothing_but_the_output_of_an_earlier_demo_is_deleted(tmp_path: Path) -> None:
    settings = DemoSettings(output_dir=str(tmp_path / "out"))
    for _ in range(2):  # a new folder, then that of the demo before
        make_directory(settings)
        assert [path.name for path in settings.directory.iterdir()] == ["versions"]
        save_settings(settings)
        (settings.directory / "log").write_text("old")
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(
        ConfigError, match=f"an empty one, or that of an earlier .* got {tmp_path}$"
    ):
        make_directory(DemoSettings(output_dir=str(tmp_path)))
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"demo: --output .* cannot be made"):
        make_directory(DemoSettings(output_dir=str(tmp_path / "thesis.tex")))


def test_an_engine_may_not_be_killed_in_the_last_update() -> None:
    with pytest.raises(ConfigError, match=r"kill_engine_at must be in \[0, steps=4\)"):
        DemoSettings(steps=4, kill_engine_at=4)
    assert DemoSettings(steps=4, kill_engine_at=3).kill_engine_at == 3
