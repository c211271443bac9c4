"""Short patterns for many tensor names, and advice if trainers and engines use different names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a dotted name that is a number."""
_MOST = 6
"""Maximum number of patterns in a message."""

_Shape = tuple[int, ...]


def patterns_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in layer or expert numbers: pattern -> names."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(NUMBER.sub("*", name), []).append(name)
    return found


def said(names: Iterable[str]) -> str:
    """Return names as short text for a message: `48 of 'model.layers.*.mlp.gate.weight', 'lm_head.weight'`."""
    groups = patterns_of(sorted(names))
    words = [
        repr(of[0]) if len(of) == 1 else f"{len(of)} of {pattern!r}"
        for pattern, of in groups.items()
    ]
    rest = sum(len(of) for of in [*groups.values()][_MOST:])
    return ", ".join(words[:_MOST]) + (f" and {rest} more" if rest else "")


def as_argument(names: Sequence[str]) -> str:
    """Return patterns that match `names`, written as a Python tuple, for a message.

    The tuple has at most six patterns. If there are more patterns, the text ends with the number of
    omitted patterns.
    """
    patterns = [of[0] if len(of) == 1 else p for p, of in patterns_of(names).items()]
    rest = len(patterns) - _MOST
    more = f", and {rest} more pattern{'s' * (rest > 1)}" if rest > 0 else ""
    return f"({', '.join(map(repr, patterns[:_MOST]))},){more}"


def renaming(
    missing: Mapping[str, _Shape], there: Mapping[str, _Shape], matched: Collection[str] = ()
) -> str:
    """Return advice for an error about tensors that an engine needs and no trainer has.

    If a wrapper such as FSDP1 or PEFT has changed the trainer's names, the advice says how to remove the wrapper.
    Otherwise, try to change the prefix or the last part of the names. If exactly one change finds a trainer tensor for
    every missing tensor, the advice contains this change as a `name_map`. If not, the advice only lists the trainer's
    names and says that a `name_map` is needed.

    Args:
        missing: names and shapes of tensors that an engine needs and no trainer has.
        there: names and shapes of trainer tensors that the engine does not need.
        matched: names that both the trainer and the engine have.

    Returns:
        The advice; "" if `there` is empty.
    """
    if not there:
        return ""
    held = f"; trainers have {said(there)} instead"
    for mark, remedy in _WRAPPERS:
        if any(mark.search(name) for name in there):
            return f"{held}: {remedy}"
    changes = {
        tuple(sorted(change.pairs.items())): change
        for change in sorted(_changes(missing, there), key=lambda change: -len(change.line))
        if change.fits(there, matched)
    }
    if len(changes) == 1:
        (change,) = changes.values()
        return f"{held}: pass `name_map={change.line}`"
    return f"{held}: pass a `name_map` from these names to the missing names"


_WRAPPERS = tuple(
    (re.compile(mark), remedy)
    for mark, remedy in (
        (
            r"(^|\.)(_fsdp_wrapped_module\.|_flat_param$)",
            (
                "FSDP1 shards these tensors and hides the parameters: shard with FSDP2 (`fully_shard`), or publish "
                "inside `FSDP.summon_full_params` with a `name_map` that removes `_fsdp_wrapped_module.`"
            ),
        ),
        (
            (
                r"(^|\.)(lora_|base_layer(\.|$)|modules_to_save(\.|$)|original_module(\.|$)|base_model\.model\.|"
                r"prompt_encoder\.|prompt_embeddings|ia3_l|hada_|lokr_|oft_|vera_lambda|boft_|trainable_tokens)"
            ),
            (
                "these are names of a PEFT model, and its base lacks the changes of the adapters: merge the adapters "
                "first (`merge_and_unload()`, or `merge_adapter()` while an update runs, with a `name_map`), or serve "
                "the adapter (`name_map=adapter_names()`); prompt tuning cannot be served as weights"
            ),
        ),
        (
            r"(^|\.)parametrizations\.|\.weight_[gv]$|(^|\.)\w+_orig$|(^|\.)original[01]?$",
            (
                "these are parts of parametrised weights (weight norm, spectral norm, pruning), and no engine "
                "computes a weight from its parts: publish a copy of the model without parametrisations "
                "(`torch.nn.utils.parametrize.remove_parametrizations`)"
            ),
        ),
        (
            r"\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format)$|\.quant_state\.",
            (
                "bitsandbytes has quantised these tensors, and engines cannot read its codes: train the model without "
                "quantisation, or publish dequantised weights"
            ),
        ),
        (
            r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)\.",
            (
                "torch.compile or activation checkpointing has added a prefix to these names: pass the bare module, "
                "or a `name_map` that removes `_orig_mod.` and `_checkpoint_wrapped_module.`"
            ),
        ),
    )
)
"""Marks of wrappers in names, and advice for each."""
_FEWEST_PARTS = 3
"""Minimum number of parts after the prefix, not counting numbers, that two names must have in common
before a change of the prefix is proposed."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of names that finds a source for every missing tensor.

    Attributes:
        pairs: missing name -> name of its source.
        begins: prefixes of the names that the change applies to.
        ends: suffix of the names that the change applies to.
        line: Python expression of the `name_map`.
    """

    pairs: Mapping[str, str]
    begins: tuple[str, ...]
    ends: str
    line: str

    def fits(self, there: Mapping[str, _Shape], matched: Collection[str]) -> bool:
        """Return True if the change renames no tensor in `matched`, and gives no two tensors the same name."""
        changed = [n for n in matched if f"{n}.".startswith(self.begins) and n.endswith(self.ends)]
        others = there.keys() - self.pairs.values()
        return not changed and self.pairs.keys().isdisjoint({*matched, *others})


def _changes(missing: Mapping[str, _Shape], there: Mapping[str, _Shape]) -> Iterator[_Change]:
    """Yield each change of names that finds a source of the same shape for every missing tensor.

    A change replaces either a prefix of the names or their last part.
    """
    first = min(missing)
    parts = first.split(".")
    prefixes: set[tuple[str, str]] = set()
    suffixes: set[tuple[str, str]] = set()
    for other, shape in there.items():
        if shape != missing[first] or other == first:
            continue
        held = other.split(".")
        common = _num_common(parts[::-1], held[::-1])
        for keep in range(1, common + 1):
            new, old = parts[: len(parts) - keep], held[: len(held) - keep]
            if not any(map(str.isdecimal, (*new, *old))):
                prefixes.add((".".join(old), ".".join(new)))
        if held[:-1] == parts[:-1] and not (parts[-1].isdecimal() or held[-1].isdecimal()):
            suffixes.add((held[-1], parts[-1]))
    for old_prefix, new_prefix in sorted(prefixes):
        yield from _prefix_change(old_prefix, new_prefix, missing, there)
    for old_suffix, new_suffix in sorted(suffixes):
        yield from _suffix_change(old_suffix, new_suffix, missing, there)


def _prefix_change(
    old: str, new: str, missing: Mapping[str, _Shape], there: Mapping[str, _Shape]
) -> Iterator[_Change]:
    """Yield the change of prefix `old` into `new` if this change finds a source for every missing tensor.

    Yield nothing if the missing names have only one pattern, with few parts after the prefix: the match may then be a
    coincidence.
    """
    before, after = old and f"{old}.", new and f"{new}."
    pairs = {n: before + n.removeprefix(after) for n in missing if n.startswith(after)}
    if not _has_every_source(pairs, missing, there):
        return
    tails = patterns_of(name.removeprefix(after) for name in missing)
    num_parts = min(sum(part != "*" for part in tail.split(".")) for tail in tails)
    fewest = _FEWEST_PARTS if before and after else _FEWEST_PARTS - 1
    if num_parts < fewest and len(tails) < 2:
        return
    if before:
        begins: tuple[str, ...] = (before,)
        line = f"name.removeprefix({before!r})"
        if after:
            line = f"{after!r} + {line} if name.startswith({before!r}) else name"
    else:
        heads = tuple(sorted({name.split(".")[0] for name in pairs.values()}))
        begins = tuple(f"{head}." for head in heads)
        line = f"{after!r} + name if name.split('.')[0] in {heads!r} else name"
    yield _Change(pairs, begins, "", f"lambda name: {line}")


def _suffix_change(
    old: str, new: str, missing: Mapping[str, _Shape], there: Mapping[str, _Shape]
) -> Iterator[_Change]:
    """Yield the change of the last part `old` into `new` if this change finds a source for every missing tensor.

    Yield nothing if the missing names have only one pattern, because the match may then be a coincidence.
    """
    before, after = f".{old}", f".{new}"
    pairs = {n: n.removesuffix(after) + before for n in missing if n.endswith(after)}
    if _has_every_source(pairs, missing, there) and len(patterns_of(missing)) > 1:
        line = f"name.removesuffix({before!r}) + {after!r} if name.endswith({before!r}) else name"
        yield _Change(pairs, ("",), before, f"lambda name: {line}")


def _has_every_source(
    pairs: Mapping[str, str], missing: Mapping[str, _Shape], there: Mapping[str, _Shape]
) -> bool:
    """Return True if `pairs` gives every missing tensor a source in `there` that has the same shape."""
    return len(pairs) == len(missing) and all(
        there.get(source) == missing[name] for name, source in pairs.items()
    )


def _num_common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Return the number of equal parts at the start of two names."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
