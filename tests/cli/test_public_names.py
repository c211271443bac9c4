"""Public names exist, are on docs/api.md, and are the only names that pages and examples import."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, blocks, tree_of

from tools import render_api

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
OF_FRAMEWORKS = (
    *("windlass.integrations.trl", "windlass.integrations.areal"),
    "windlass.integrations.vllm.trainer",
)
PACKAGES = pytest.mark.parametrize("package", render_api.PACKAGES)


@PACKAGES
def test_every_public_name_can_be_imported_and_an_unknown_name_cannot(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name, home in render_api.public_names(package).items():
        # Importing Megatron takes seconds and prints warnings. TRL, AReaL and vLLM have separate
        # environments.
        if "megatron" not in home and not home.startswith(OF_FRAMEWORKS):
            value = getattr(module, name)
            assert value is vars(importlib.import_module(home))[name]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


@PACKAGES
def test_a_type_checker_sees_exactly_the_public_names(package: str) -> None:
    """The imports under TYPE_CHECKING agree with the names that the package derives from them."""
    assert set(render_api.public_names(package)) == set(importlib.import_module(package).__all__)


def test_importing_the_packages_imports_no_web_server_and_no_framework() -> None:
    packages = ", ".join(package for package in render_api.PACKAGES if package != "windlass.cli")
    script = f"import sys, {packages}; print({{'aiohttp', 'numpy', 'torch'}} & set(sys.modules))"
    done = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_page_documents_every_public_name_from_its_docstring() -> None:
    assert render_api.PAGE.read_text() == render_api.page(), "run tools/render_api.py"
    shown = set(re.findall(r"^\| `(\w+)` \|", render_api.PAGE.read_text(), re.MULTILINE))
    assert set(render_api.public_names("windlass")) <= shown


def test_every_error_that_is_raised_on_purpose_is_public() -> None:
    errors = importlib.import_module("windlass.errors")
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes - {"annotations"} <= set(render_api.public_names("windlass"))


def internal_imports(tree: ast.AST) -> list[str]:
    """Return imports from Windlass that bypass its public packages."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "windlass":
            module = node.module or ""
            names = [alias.name for alias in node.names]
            public = render_api.public_names(module) if module in render_api.PACKAGES else {}
            found += [f"{module}.{name}" for name in names if name not in public]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "windlass"]
            found += [name for name in names if name not in render_api.PACKAGES]
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_import_only_public_names(example: Path) -> None:
    assert internal_imports(ast.parse(example.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_import_and_name_only_public_names(page: Path) -> None:
    for code in blocks(page):
        assert internal_imports(tree_of(code)) == []
    # Remove values of engine options.
    text = re.sub(r"--[\w-]+ windlass\.[\w.]+", "", page.read_text())
    for package, name in re.findall(r"\b(windlass(?:\.[a-z_]+)*)\.([A-Z]\w*[a-z]\w*)", text):
        assert name in render_api.public_names(package), f"{package}.{name}"


def test_an_internal_import_would_be_found() -> None:
    code = (
        "import windlass.net\nfrom windlass.config import ControlConfig\nfrom windlass import net"
    )
    assert len(internal_imports(ast.parse(code))) == 3
