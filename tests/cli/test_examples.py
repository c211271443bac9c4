"""The scripts of the README, started as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from screens import on_screen, unwrapped

from windlass.net.addresses import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE_S = 220
MODEL = str(EXAMPLES / "launch" / "model.json")
ENGINE = ("--name", "e", "--controller", "http://127.0.0.1:9", "--model")


TUTORIAL = ROOT / "docs/tutorials/laptop.md"


@pytest.mark.long
def test_commands_of_the_tutorial_train_and_end(tmp_path: Path) -> None:
    """The test runs them in one terminal, in order, with fewer steps and a free port."""
    section = TUTORIAL.read_text().partition("## Your own scripts")[2].partition("\n## ")[0]
    typed = re.findall(r"^ {4,8}(\S.*)$", section, re.MULTILINE)
    assert [line.split()[0] for line in typed] == [
        *("export", "python", "python", "python", "torchrun", "windlass", "kill")
    ]
    typed.remove("windlass status $URL --watch")
    typed.insert(2, "controller=$!")
    typed.insert(-1, "wait $controller && echo the controller has ended well")
    script = "\n".join(typed)
    for old, new in (
        ("8765", str(free_port())),
        ("--steps 200", "--steps 3"),
        ("$PWD/.venv/bin", str(Path(sys.executable).parent)),
        (" examples/", f" {EXAMPLES}/"),
    ):
        assert old in script
        script = script.replace(old, new)
    status, terminal = on_screen(
        ("bash", "-c", script),
        *(80, 24),
        cwd=tmp_path,
        environment={"PYTHONPATH": str(ROOT / "src")},
    )
    lines = terminal.lines()
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert status == 0, (lines, logs)
    versions = [line.split(":")[0] for line in lines if line.startswith("version ")]
    assert versions == [f"version {n}" for n in range(4)], logs
    assert lines[-1].endswith("the controller has ended well")
    assert "Traceback" not in unwrapped(lines) + logs


def late(command: tuple[str, ...], says: str) -> object:
    """Return a case that takes long, because the example imports torch."""
    return pytest.param(command, says, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("controller.py",), "WINDLASS_TOKEN must be set to a secret"),
        (("agentic.py", "controller"), "WINDLASS_TOKEN must be set to a secret"),
        (("agentic.py",), "arguments are required: role"),
        (("agentic.py", "worker"), "arguments are required: --controller"),
        late(("trainer.py",), "arguments are required: url, config"),
        late(
            ("trainer.py", "URL", "nowhere.json"), "CONFIG must be a JSON file .* got nowhere.json"
        ),
        (("trainer.py", "URL", MODEL), "RANK must be set by torchrun, got none; run `torchrun"),
        late(("own_engine.py",), "arguments are required: --name, --model, --controller"),
        late(
            ("own_engine.py", *ENGINE, "nowhere.json"), "--model must be a JSON file .*nowhere.json"
        ),
        (("own_engine.py", *ENGINE, MODEL), "WINDLASS_TOKEN must be set to the controller's"),
        (("launch/trainer.py",), "WINDLASS_TRANSPORT and the argument CONFIG.json must be given"),
        (("plugins/engine/windlass_tiny_engine/__main__.py",), "required: --name, --model"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_an_example_names_its_missing_settings(command: tuple[str, ...], says: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for name in ("WINDLASS_TOKEN", "WINDLASS_TOKEN_FILE", "RANK", "WINDLASS_TRANSPORT"):
        environment.pop(name, None)
    done = subprocess.run(
        (sys.executable, str(EXAMPLES / command[0]), *command[1:]),
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode in {1, 2}
    assert "Traceback" not in done.stderr
    assert re.search(says, unwrapped(done.stderr.splitlines())), done.stderr
