"""Many names of tensors in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["NUMBER", "patterns_of", "said"]

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a dotted name."""
_MOST = 6


def patterns_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ in their numbers alone: of layers, of experts."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(NUMBER.sub("*", name), []).append(name)
    return found


def said(names: Iterable[str]) -> str:
    """Say all of these names by pattern: `48 of 'model.layers.*.mlp.gate.weight', 'lm_head.weight'`."""
    groups = patterns_of(sorted(names))
    words = [
        repr(of[0]) if len(of) == 1 else f"{len(of)} of {pattern!r}"
        for pattern, of in groups.items()
    ]
    rest = sum(len(of) for of in [*groups.values()][_MOST:])
    return ", ".join(words[:_MOST]) + (f" and {rest} more" if rest else "")
