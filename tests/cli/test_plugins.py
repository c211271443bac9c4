"""Windlass finds its own and other distributions' engines, families and commands by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from windlass.cli import COMMANDS, Command
from windlass.cli.main import main
from windlass.engines.spec import ENGINES
from windlass.errors import ConfigError
from windlass.layout.naming.rules import Family
from windlass.layout.naming.tables import FAMILIES


def distribution(
    folder: Path, name: str, group: str, points: dict[str, str], code: str = ""
) -> None:
    """Write an installed distribution with a module of the same name."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "\n".join(f"{point} = {value}" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_built_in_plugin_is_found_by_its_name() -> None:
    assert ENGINES.names() == ("embedded", "sglang", "vllm")
    assert {"doctor", "launch", "serve", "status", "token"} <= set(COMMANDS.names())
    assert {"llama", "qwen3_moe", "deepseek_v3", "mixtral"} <= set(FAMILIES.names())
    for name in ENGINES.names():
        assert ENGINES.find(name).name == name
    for name in FAMILIES.names():
        assert FAMILIES.find(name).name == name
    for name in COMMANDS.names():
        assert COMMANDS.find(name).summary


def test_a_distribution_adds_a_plugin_by_an_entry_point(site: Path) -> None:
    code = "from windlass.layout.naming.rules import Family\nFAMILY = Family('mine', ())\n"
    distribution(site, "mine_dist", "windlass.families", {"mine": "mine_dist:FAMILY"}, code)
    assert FAMILIES.find("mine") == Family("mine", ())
    assert FAMILIES.names()[-1] == "mine"


def test_an_unknown_name_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        ConfigError, match=r"engine must be one of embedded, sglang, vllm, .* got 'x'"
    ):
        ENGINES.find("x")


def test_two_plugins_of_one_name_are_refused_with_both_distributions(site: Path) -> None:
    distribution(site, "first", "windlass.engines", {"vllm": "first:ENGINE", "new": "first:ENGINE"})
    distribution(site, "second", "windlass.engines", {"new": "second:ENGINE"})
    with pytest.raises(
        ConfigError, match=r"engine 'vllm' .* got windlass and first 1\.2: uninstall"
    ):
        ENGINES.find("vllm")
    with pytest.raises(ConfigError, match=r"engine 'new' .* got (first|second) 1\.2 and "):
        ENGINES.find("new")
    assert ENGINES.find("sglang").name == "sglang", "the others are not harmed"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("COMMAND = 3\n", r"must be a windlass\.cli\.Command, got int"),
        (
            "import no_such_module\n",
            r"must be importable, but broken:COMMAND raised ModuleNotFoundError",
        ),
        ("", r"must be importable, but broken:COMMAND raised AttributeError"),
    ],
)
def test_a_bad_plugin_is_refused_with_its_distribution(
    code: str, says: str, site: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    distribution(site, "broken", "windlass.commands", {"bad": "broken:COMMAND"}, code)
    with pytest.raises(ConfigError, match=rf"command 'bad' of broken 1\.2 {says}"):
        COMMANDS.find("bad")
    assert main(["bad"]) == 2
    assert "broken 1.2" in capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "cannot be used: command 'bad' of broken 1.2" in shown
    assert COMMANDS.find("status").summary in shown


def test_built_in_commands_are_found_and_unknown_ones_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert isinstance(COMMANDS.find("token"), Command)
    with pytest.raises(SystemExit, match="2"):
        main(["no-such-command"])
    assert "invalid choice: 'no-such-command'" in capsys.readouterr().err
