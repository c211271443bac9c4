"""Many names of tensors in few words, and what to write where two sides name them otherwise."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a dotted name."""
_MOST = 6
_LEAST_ALIKE = 0.5

_Shape = tuple[int, ...]


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


def renaming(missing: Mapping[str, _Shape], there: Mapping[str, _Shape]) -> str:
    """Say what the other side has in place of missing tensors, and which `name_map` would join them.

    Args:
        missing: names that one side needs, with their shapes.
        there: what the other side has and nobody needs.

    Returns:
        Words for the end of a message; empty where nothing is alike.
    """
    wanted, held = patterns_of(sorted(missing)), patterns_of(sorted(there))
    steps: dict[tuple[str, str], None] = {}
    words: list[str] = []
    for pattern, names in wanted.items():
        shapes = {missing[name] for name in names}
        alike = [one for one, of in held.items() if shapes & {there[name] for name in of}]
        nearest = difflib.get_close_matches(pattern, alike, 1, _LEAST_ALIKE)
        if not nearest:
            continue
        of = held[nearest[0]]
        words.append(
            f"{nearest[0]!r} for {pattern!r}" if len(of) > 1 else f"{of[0]!r} for {names[0]!r}"
        )
        step = _step(nearest[0], pattern)
        if {one.replace(*step) for one in of} >= set(names):
            steps[step] = None
    if not words:
        return ""
    said_of = f"; the other side has {', '.join(words[:_MOST])}"
    calls = "".join(f".replace({old!r}, {new!r})" for old, new in steps)
    line = f": pass `name_map=lambda name: name{calls}`" if steps else ""
    return said_of + line


def _step(old: str, new: str) -> tuple[str, str]:
    """What to replace by what, in whole parts of names and with a dot on each side that has one."""
    ours, theirs = old.split("."), new.split(".")
    begin = _num_common(ours, theirs)
    end = _num_common(ours[begin:][::-1], theirs[begin:][::-1])
    # A part that both have stands on each side: what is replaced must be found, and nowhere else.
    low = max(begin - 1, 0)
    if begin and "*" in ours[low:begin]:
        low = begin
    high = end - 1 if end and ours[-end] != "*" else end

    def middle(parts: list[str]) -> str:
        return ".".join(parts[low : len(parts) - high])

    left = "." if low else ""
    right = "." if high else ""
    return left + middle(ours) + right, left + middle(theirs) + right


def _num_common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """How many parts two names begin with alike."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
