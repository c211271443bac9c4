"""This project is `windlass-rl` on PyPI. `windlass` is another project, and nothing installs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from windlass import __version__
from windlass.cli import checks
from windlass.cli.main import main
from windlass.wording import install_command

ROOT = Path(__file__).resolve().parents[2]
THEIR_METADATA = (
    "Metadata-Version: 2.1\nName: windlass\nVersion: 0.1.1\n"
    "Summary: The modular AI application framework\n"
)
NAME = r"""["'`]?windlass(?![-\w./:])(\[[\w,-]+\])?"""
TELLS = (
    re.compile(
        rf"pip\S* (?:-\S+ )*install\b(?: [^\s`&|;#,]+)*? {NAME}(?=[\s\"'`,.;:)]|$)", re.MULTILINE
    ),
    re.compile(r"""["'`]windlass\["""),
    re.compile(r"""\bwindlass ?(?:==|>=|~=|@ git)"""),
    re.compile(r"\buv (?:add|tool install|pip install)\b[^\n]* windlass\b(?![-/.])"),
)


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def told(text: str) -> list[str]:
    return [found.group() for tells in TELLS for found in tells.finditer(text)]


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("pip install windlass", True),
        ("first `pip install windlass` there", True),
        ("pip install --quiet 'windlass[trl]' # and", True),
        ("python -m pip install -U windlass, then", True),
        ("uv pip install windlass", True),
        ('dependencies = ["windlass[torch]"]', True),
        ("windlass==0.1.0", True),
        ("pip install .", False),
        ("pip install windlass-rl", False),
        ("pip uninstall windlass", False),
        ("pip install . in the folder of Windlass's sources", False),
    ],
)
def test_the_search_finds_names_of_the_other_project(text: str, is_wrong: bool) -> None:
    assert bool(told(text)) is is_wrong


def test_no_file_names_the_other_project_for_installation() -> None:
    found = {}
    for path in files():
        if path == Path(__file__) or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if wrong := told(text):
            found[str(path.relative_to(ROOT))] = wrong
    assert found == {}


def test_doctor_compares_with_our_name_and_description() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == (checks.DISTRIBUTION, __version__)
    assert project["description"] == checks.SUMMARY
    own = [
        name
        for names in project["optional-dependencies"].values()
        for name in names
        if name.startswith("windlass")
    ]
    assert own
    assert all(name.startswith("windlass-rl[") for name in own)
    for path in (ROOT / "examples/plugins").glob("*/pyproject.toml"):
        assert "windlass-rl" in tomllib.loads(path.read_text())["project"]["dependencies"]


def other_project(site: Path, metadata: str = THEIR_METADATA) -> Path:
    info = site / "windlass-0.1.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata)
    return site


def test_doctor_recognises_the_other_project_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(other_project(tmp_path))
    finding = checks.check_package()
    assert finding.status is checks.FAILS
    assert "the package windlass 0.1.1 of another project is installed here" in finding.found
    assert f"{sys.executable} -m pip uninstall windlass, then install again" in finding.remedy
    assert install_command(python=sys.executable) in finding.remedy


def test_doctor_knows_an_installation_under_our_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = f"Metadata-Version: 2.1\nName: windlass\nVersion: 0.1.0\nSummary: {checks.SUMMARY}\n"
    monkeypatch.syspath_prepend(other_project(tmp_path, ours))
    finding = checks.check_package()
    assert finding.status is checks.LIMITED
    assert "an old release named windlass" in finding.found


def test_doctor_recognises_the_other_project_in_another_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site = other_project(tmp_path)
    (site / "windlass").mkdir()
    (site / "windlass/__init__.py").write_text("print('agents')\n")
    python = tmp_path / "python"
    # -S leaves the packages of this environment out.
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert main(["doctor", "--json", "--engine-python", str(python)]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    (finding,) = report[str(python)]
    assert finding["status"] == "fails"
    assert "windlass 0.1.1" in finding["found"]
    assert finding["remedy"].startswith(f"{python} -m pip uninstall windlass, then ")


def test_doctor_prints_nothing_of_a_library_before_its_table(tmp_path: Path) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "windlass.cli.main", "doctor"),
        capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.startswith(sys.executable)
