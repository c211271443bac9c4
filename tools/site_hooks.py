"""Hooks of mkdocs that add pages from outside docs/ and the reference of every public name.

Pages link to files by their path in the repository (`../SECURITY.md`, `../examples/trainer.py`). The hooks copy each
such file to the site, under its path from the root, and rewrite the links.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import render_api  # noqa: E402 - mkdocs loads this file by its path

DOCS = ROOT / "docs"
OUTSIDE = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))|(?<=src=\")([\w./-]+)(?=\")")


def place(path: Path) -> str:
    """Return the path in the site of a file of the repository."""
    return str(path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT))


def targets(page: Path) -> list[Path]:
    """Return the files of the repository that a page links to."""
    found = [match[1] or match[3] for match in LINK.finditer(page.read_text())]
    return [path for link in found if (path := (page.parent / link).resolve()).is_file()]


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of the packages to the navigation, at the list of public names in mkdocs.yml."""
    packages = [{package: f"api/{package}.md"} for package in render_api.PACKAGES]
    for part in config.nav or []:
        for entry in part.get("Reference", ()):
            if entry.get("Public names") == "api.md":
                entry["Public names"] = ["api.md", *packages]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add linked files from outside docs/, and one page per public package."""
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in OUTSIDE)]
    linked = {path for page in pages for path in targets(page)} | set(pages)
    for path in sorted(linked):
        if path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
    for package in render_api.PACKAGES:
        made = File.generated(config, f"api/{package}.md", content=render_api.reference(package))
        files.append(made)
    return files


def on_page_markdown(text: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs names them
    """Rewrite links to the paths of the files in the site."""
    if page.file.src_uri == "api.md":
        text = re.sub(r"^## (windlass\S*)$", r"## [\1](api/\1.md)", text, flags=re.MULTILINE)
    if page.file.abs_src_path is None:  # made here
        return text
    folder = Path(page.file.abs_src_path).parent
    here = os.path.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = (folder / (match[1] or match[3])).resolve()
        if not path.is_file() or not path.is_relative_to(ROOT):
            return match[0]  # mkdocs says that it is not there
        return os.path.relpath(place(path), here or ".") + (match[2] or "")

    return LINK.sub(moved, text)
