"""A test or a script runs every command on a page, or a short list gives the reason why not."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import socket
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from page_runs import LANGUAGES, NOT_RUN, RUN, SCRIPTS, Shown, shown
from pages import PAGES, ROOT, Block, all_blocks, commands_of

from windlass import envs
from windlass.cli.main import full_parser
from windlass.engines.launch import checked_arguments
from windlass.engines.spec import ENGINES

SHOWN = list(shown())
GIVEN = {"NAME": "all"}
"""Placeholder on a page -> value."""
NEEDED = {"benchmarks/gpu/run_prove_live_engine.sh": " --case all"}
STUB = '#!/bin/sh\n{ printf "%s\\n" "$@"; echo; } >>"$ASKED"\n'


def names(each: Shown) -> str:
    return f"{each.block.page.relative_to(ROOT)}:{each.block.line}: {each.what}"


def test_every_command_on_a_page_names_its_runner_or_a_reason() -> None:
    assert not [names(each) for each in SHOWN if not (each.run_by or each.why_not)]
    assert len(SHOWN) > 130


def test_every_pattern_of_the_tables_occurs_on_a_page() -> None:
    assert set(RUN) | set(NOT_RUN) | set(LANGUAGES) <= {each.pattern for each in SHOWN}
    assert len(NOT_RUN) < 10


def test_every_runner_of_a_command_exists() -> None:
    """A runner is a test of that name, or a script with these words."""
    for run_by in {each.run_by for each in SHOWN if each.run_by}:
        path, _, wanted = run_by.partition("::")
        text = (ROOT / path).read_text()
        if wanted.startswith("test_"):
            kinds = ast.FunctionDef | ast.AsyncFunctionDef
            assert wanted in {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)}
        else:
            assert wanted in text, run_by


def test_every_option_on_a_page_belongs_to_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Every value must be valid as well."""
    count = 0
    for each in (each for each in SHOWN if each.block.language == "bash"):
        words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", each.what))
        count += 1
        if words[:1] == ["windlass"]:
            full_parser().parse_args(words[1:])
        elif words[:2] == ["make", "demo"] and len(words) > 2:
            full_parser().parse_args(["demo", *shlex.split(words[2].removeprefix("ARGS="))])
        elif words[:2] == ["python", "-m"] and words[2].startswith("windlass.engines."):
            engine = ENGINES.find(words[2].rpartition(".")[2])
            if engine.server is not None:
                args = checked_arguments(engine, words[3:])
                assert args.tp * args.pp * args.dp in (1, 2, 16), names(each)
        elif words[:1] == ["make"]:
            made = subprocess.run(("make", "-n", *words[1:]), cwd=ROOT, capture_output=True)
            assert made.returncode == 0, made.stderr
        else:
            count -= 1
    assert count > 25
    assert capsys.readouterr().err == ""


def test_pages_install_only_existing_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {
        x for page in PAGES for x in re.findall(r"(?:windlass|\.)\[([\w-]+)\]", page.read_text())
    }
    assert len(named) > 3
    assert named <= set(extras)


def test_windlass_reads_every_variable_that_a_page_sets() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/windlass").rglob("*.py"))
    assert envs.TOKEN_VARIABLE in source
    for each in SHOWN:
        for name in re.findall(r"\b(WINDLASS_[A-Z_]+)=", each.what):
            assert f'"{name}"' in source, names(each)


def test_settings_on_a_page_name_existing_objects() -> None:
    """Names of Windlass in settings must exist.

    Our own settings must occur in an example or a job.
    """
    ours = "".join(path.read_text() for path in ROOT.glob("examples/**/*.toml"))
    counts = {"yaml": 0, "toml": 0}
    for block in (b for page in PAGES for b in all_blocks(page) if b.language in counts):
        counts[block.language] += 1
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)
        else:
            (table,) = tomllib.loads(block.text)
            assert table == "scheduler" or all(line in ours for line in block.text.splitlines())
        for name in re.findall(r"\bwindlass(?:\.\w+)+(?::\w+)?", block.text):
            module, _, attribute = name.partition(":")
            if not attribute and module.rpartition(".")[2][0].isupper():
                module, _, attribute = module.rpartition(".")
            path = ROOT / "src" / module.replace(".", "/")
            files = [path.with_suffix(".py"), path / "__init__.py"]
            assert any(f"{attribute}" in f.read_text() for f in files if f.exists()), name
    assert min(counts.values()) > 2


def test_drawings_and_outputs_are_fenced_as_text() -> None:
    """An indented block in no known language must be fenced as text."""
    texts = [each for each in SHOWN if each.block.language == "text"]
    assert len(texts) < 10


@pytest.mark.long
def test_every_script_parses_its_command_line(tmp_path: Path) -> None:
    """Benchmarks and tools only parse their options. Shell scripts run with stub programs."""
    asked, folder = tmp_path / "asked", tmp_path / "bin"
    folder.mkdir()
    for name in ("python3", "nvidia-smi", "mpiexec"):
        (folder / name).write_text(STUB if name == "python3" else "#!/bin/sh\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "ASKED": str(asked), "PATH": f"{folder}:{os.environ['PATH']}"}
    lines: list[list[str]] = []
    for command in script_lines():
        assignments, words = re.match(r"((?:\w+=\S+ )*)(.*)", command), shlex.split(command)
        assert assignments is not None
        words = [w for w in words if not re.fullmatch(r"[A-Z]+=\S+", w)]
        if not words[0].endswith(".sh"):
            lines.append(words[1:] if "python" in words[0] else words)
            continue
        given = dict(each.split("=") for each in assignments[1].split())
        words = [str(tmp_path) if w in ("OUT", "/tmp/reference") else w for w in words]
        asked.unlink(missing_ok=True)
        subprocess.run(
            ("bash", *words), cwd=ROOT, env={**environment, **given}, check=False, timeout=60
        )
        called = [part.splitlines() for part in asked.read_text().split("\n\n") if part.strip()]
        assert called, command
        folder_of = Path(words[0]).parent if words[0].startswith("benchmarks/run_") else Path()
        for argv in called:
            if argv[0].endswith(".py"):
                lines.append([str(folder_of / argv[0]), *argv[1:]])
            elif argv[:2] == ["-m", "pytest"]:
                tests = [word for word in argv if word.startswith("tests")]
                assert all((ROOT / name).exists() for name in tests), command
            elif argv[0] == "-m":
                lines.append(argv)
    assert len(lines) > 60
    done = subprocess.run(
        (sys.executable, str(ROOT / "tests/support/parse_options.py")),
        input=json.dumps(lines),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}:{ROOT}/benchmarks"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
    )
    problems = json.loads(done.stdout)
    assert not [f"{shlex.join(a)}: {p}" for a, p in zip(lines, problems, strict=True) if p]


def script_lines() -> list[str]:
    """Return the command lines of benchmarks and tools.

    They come from blocks and running text. Every GPU script is added as in its usage text, and with
    help.
    """
    found = [each.what for each in SHOWN if SCRIPTS.match(each.what)]
    for page in PAGES:
        inline = re.findall(r"(?<!`)`([^`\n]+ [^`\n]+)`", page.read_text())
        lines = (
            re.sub(r"\|\w+|NAME| \[.*\]", lambda m: GIVEN.get(m[0], ""), line) for line in inline
        )
        found += [line for line in lines if SCRIPTS.match(line) and "FOLDER" not in line]
    scripts = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/gpu/run_*.sh"))
    own = (f"{script} OUT{NEEDED.get(script, '')}" for script in scripts if "m2n" not in script)
    helped = sorted(ROOT.glob("benchmarks/**/bench_*.py"))
    return [*found, *own, *(f"{path.relative_to(ROOT)} --help" for path in helped)]


def test_the_commands_of_the_tls_page_make_a_trusted_authority(tmp_path: Path) -> None:
    first, second = (b for b in all_blocks(ROOT / "docs/tls.md") if b.language == "bash")
    script = f"""set -e
windlass() {{ exec "$PYTHON" -m windlass.cli.main "$@" --port 0; }}
{second.text}
{first.text}
"""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}/src"}
    with subprocess.Popen(
        ("bash", "-c", script), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as served:
        try:
            assert served.stdout is not None
            found = re.fullmatch(r"https://controller.example:(\d+)\n", served.stdout.readline())
            assert found is not None
            context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            # Python 3.13 and later set this flag.
            context.verify_flags |= ssl.VERIFY_X509_STRICT
            address = "127.0.0.1", int(found[1])
            with (
                socket.create_connection(address, 10) as plain,
                context.wrap_socket(plain, server_hostname="controller.example") as line,
            ):
                assert line.getpeercert() is not None
        finally:
            served.kill()
    asked = (tmp_path / "engine.csr").read_text()
    shown = subprocess.run(
        ("openssl", "req", "-noout", "-subject"), input=asked, capture_output=True, text=True
    )
    assert re.search(r"OU ?= ?windlass-engine", shown.stdout)


@pytest.mark.parametrize(
    ("text", "language", "commands"),
    [
        ("windlass frobnicate   # a remark", "bash", ["windlass frobnicate"]),
        ("# both\npip install a \\\n    b\nmake x", "bash", ["pip install a b", "make x"]),
        ("[table]\nkey = 1", "toml", []),
        ("x = await y", "python", []),
        ("a ---> b", "", []),
    ],
)
def test_a_command_without_a_runner_is_found(
    tmp_path: Path, text: str, language: str, commands: list[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Words.\n\n" + re.sub("^", "    ", text, flags=re.MULTILINE) + "\n")
    assert all_blocks(page) == [Block(page, 3, language, text)]
    if language == "bash":
        assert list(commands_of(all_blocks(page)[0])) == commands
        from page_runs import _command

        assert not any(_command(all_blocks(page)[0], commands[0])[2:])
