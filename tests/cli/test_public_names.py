from __future__ import annotations

import subprocess
import sys

import pytest

import windlass


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    for name in windlass.__all__:
        assert vars(windlass).get(name) is not None or name in dir(windlass)
        exec(f"from windlass import {name}")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        exec("windlass.nothing")


def test_importing_the_package_imports_no_web_server() -> None:
    script = "import sys, windlass; print(sorted({'aiohttp', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
