"""Everything that `deploy/containers` copies, installs, sets and starts exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from windlass import envs
from windlass.cli.main import full_parser
from windlass.engines.sglang.spec import RELEASES as SGLANG
from windlass.engines.vllm.backend import BACKEND
from windlass.engines.vllm.spec import RELEASES as VLLM

ROOT = Path(__file__).parents[2]
FILES = {
    path.name.partition(".")[0]: path
    for path in (ROOT / "deploy/containers").glob("*.Containerfile")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = {
    "ARG",
    "FROM",
    "COPY",
    "RUN",
    "USER",
    "WORKDIR",
    "EXPOSE",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "ENV",
}


def instructions(name: str) -> list[tuple[str, str]]:
    """Return the keyword and the rest of each instruction, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", FILES[name].read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    found = [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line)
    ]
    assert {word for word, _ in found} <= KNOWN
    return found


def values(name: str, wanted: str) -> list[str]:
    return [rest for word, rest in instructions(name) if word == wanted]


def started(name: str) -> list[str]:
    """Return the words of the ENTRYPOINT. It is JSON, because a shell would not pass signals on."""
    (entrypoint,) = values(name, "ENTRYPOINT")
    words: list[str] = json.loads(entrypoint)
    return words


def test_the_controller_and_each_engine_have_a_containerfile() -> None:
    assert set(FILES) == {"controller", "vllm", "sglang"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_copied_files_exist_and_dockerignore_allows_them(name: str) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    copied = set[str]()
    for rest in values(name, "COPY"):
        *sources, _ = shlex.split(rest)
        copied |= set(sources)
    for source in copied:
        assert (ROOT / source).exists(), source
    assert copied == allowed
    # The build backend also reads these files, besides `src`.
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= copied


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_containerfile_installs_the_copied_files(name: str) -> None:
    (run,) = values(name, "RUN")
    install, *_ = run.split(" && ")
    (*_, folder) = shlex.split(install)
    assert folder.removesuffix("${EXTRAS}") == "/build"
    assert all(shlex.split(rest)[-1].startswith("/build/") for rest in values(name, "COPY"))
    for extra in re.findall(r"\[([a-z0-9-]+)\]", FILES[name].read_text().partition("COPY")[0]):
        assert extra in PROJECT["optional-dependencies"], extra


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_containerfile_sets_only_variables_that_windlass_reads(name: str) -> None:
    known = {value for key, value in vars(envs).items() if key.endswith("_VARIABLE")}
    for rest in values(name, "ENV"):
        variable = rest.partition("=")[0]
        assert not variable.startswith("WINDLASS_") or variable in known, variable


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_an_engine_image_has_a_tested_release(engine: object) -> None:
    assert engine in (VLLM, SGLANG)
    releases = VLLM if engine is VLLM else SGLANG
    argument, *_ = values(releases.name.lower(), "ARG")
    tag = argument.partition("=v")[2]
    assert any(tag == known or tag == f"{known}.0" for known in releases.proven), tag


def test_the_vllm_image_sets_the_registered_backend() -> None:
    *command, option, config = started("vllm")
    assert command == ["vllm", "serve"]
    assert option == "--weight-transfer-config"
    assert json.loads(config) == {"backend": BACKEND}
    assert "VLLM_SERVER_DEV_MODE=1" in values("vllm", "ENV")


@pytest.mark.parametrize("name", ["controller", "sglang"])
def test_a_containerfile_exposes_the_port_of_its_server(name: str) -> None:
    words = started(name)
    assert [words[words.index("--port") + 1]] == values(name, "EXPOSE")


def test_the_controller_image_starts_and_passes_its_health_check() -> None:
    program, *arguments = started("controller")
    full_parser().parse_args(arguments)
    assert program in PROJECT["scripts"]
    (port,) = values("controller", "EXPOSE")
    (check,) = values("controller", "HEALTHCHECK")
    health: list[str] = json.loads(check.partition("CMD ")[2])
    assert health[0] == "python"
    assert f":{port}/" in health[-1]
    arguments[arguments.index(port)] = "0"
    process = subprocess.Popen(
        (sys.executable, "-m", "windlass.cli.main", *arguments, "--advertise-host", "127.0.0.1"),
        env={**os.environ, envs.TOKEN_VARIABLE: "a token of the tests"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        asked = health[-1].replace(f"http://127.0.0.1:{port}", url)
        assert url in asked
        assert (
            subprocess.run((sys.executable, "-c", asked), timeout=30, check=False).returncode == 0
        )
        process.terminate()
        assert process.wait(30) == 0
        gone = subprocess.run(
            (sys.executable, "-c", asked), timeout=30, capture_output=True, check=False
        )
        assert gone.returncode == 1
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def test_the_page_builds_and_starts_every_image() -> None:
    page = (ROOT / "docs/containers.md").read_text()
    built = dict(re.findall(r"docker build -f (\S+) -t (\S+) \.", page))
    assert {ROOT / path for path in built} == set(FILES.values())
    for image in built.values():
        assert re.search(rf"docker run (?:[^\n]|\\\n)* {image}\b", page), image
    command = re.search(r"windlass-controller (--.*)", page)
    assert command is not None
    full_parser().parse_args([*started("controller")[1:], *shlex.split(command[1])])
