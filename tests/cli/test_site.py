"""The documentation site builds strictly, shows all public names in full, and has no dead link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tools import render_api

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)),
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Page(HTMLParser):
    """Anchors and links of a page, and the files that a browser fetches with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "src" in given:
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload"}:
            self.fetched.append(given["href"])


def dangling(site: Path) -> Iterator[str]:
    """Yield links to files or anchors that the site does not have."""
    pages = {
        path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"
    }
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            url = urlsplit(link)
            if url.scheme:
                continue
            there = (path.parent / unquote(url.path)).resolve() if url.path else path
            if there.is_dir():
                there /= "index.html"
            missing = not there.is_file()
            if not missing and there.suffix == ".html" and url.fragment:
                missing = unquote(url.fragment) not in pages[there].anchors
            if missing:
                yield f"{path.relative_to(site)}: {link}"


def test_every_link_of_the_site_has_a_target(site: Path) -> None:
    assert not list(dangling(site))
    assert sum(len(Page(path.read_text()).links) for path in site.rglob("*.html")) > 1000


def test_a_broken_link_of_the_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html">b</a> <a href="#here">a</a>')
    (tmp_path / "b.html").write_text('<a href="a.html#there">a</a> <img src="a.html">')
    assert sorted(dangling(tmp_path)) == ["b.html: a.html#there"]


def test_the_site_fetches_no_file_of_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not [name for name in Page(path.read_text()).fetched if urlsplit(name).netloc], path


def test_every_public_name_is_shown_in_full(site: Path) -> None:
    pages = {
        package: Page((site / "api" / f"{package}.html").read_text())
        for package in render_api.PACKAGES
    }
    anchors = set().union(*(page.anchors for page in pages.values()))
    for package in render_api.PACKAGES:
        homes = {f"{module}.{name}" for name, module in render_api.public_names(package).items()}
        assert homes <= anchors, package
    text = "".join(
        (site / "api" / f"{package}.html").read_text() for package in render_api.PACKAGES
    )
    _, docstring = render_api.definition("windlass.trainers.fsdp", "connect_trainer")
    raised = re.findall(r"^    (\w+): ", docstring.partition("Raises:")[2], re.MULTILINE)
    shown = text.partition('id="windlass.trainers.fsdp.connect_trainer"')[2].partition("<h2")[0]
    assert len(raised) >= 2
    assert not [name for name in raised if name not in shown]
