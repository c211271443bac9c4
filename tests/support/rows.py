"""Results of tests of live engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

MATRIX = pytest.StashKey[list[dict[str, object]]]()
"""Rows of every possible result, at first untested."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One row; all fields but the last two are its key.

    Attributes:
        outcome: `proven`, `refused` or `untested`.
        detail: the reason of a refusal.
    """

    trainer: str
    engine: str
    engine_version: str
    engine_parallelism: str
    model: str
    dtype: str
    transport: str
    mode: str
    outcome: str = "proven"
    detail: str = ""


def of_setting(
    engine: str, engine_version: str, setting: str, *, detail: str, outcome: str = "proven"
) -> Shown:
    """Return the row of an engine's setting, which holds for every trainer, model and transport."""
    return Shown(
        trainer="any", engine=engine, engine_version=engine_version, engine_parallelism="any", model="any", dtype="any",
        transport="any", mode=setting, outcome=outcome, detail=detail,
    )  # fmt: skip


Record = Callable[[Shown], None]
