"""Tensors of only one side: trainer tensors that may stay unpublished, and engine tensors that stay unchanged."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from windlass.errors import ManifestError
from windlass.layout.manifest import ShardManifest
from windlass.layout.naming.patterns import as_argument, said
from windlass.planning.rows import resolve_names

_HARMLESS = re.compile(
    r"(^|\.)(mtp(_[a-z_]+)?\.|rotary_emb\.|inv_freq$|position_ids$|masked_bias$|(cos|sin)_cached$)"
)
"""Pattern of names of harmless tensors: tables that every engine computes itself, and MTP layers, which
predict further tokens."""
_MTP_MARK = ".eh_proj.weight"
"""Name of the projection that only an MTP layer has (DeepSeek, GLM):
`model.layers.61.eh_proj.weight`."""
_SHARED_BY_MTP = ("embed_tokens.weight", "shared_head.head.weight")
"""Ends of the names of an MTP layer's copies of the model's embedding and output matrix. Engines that draft with the
layer use the model's own matrices instead, and their loaders skip the copies."""
_HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
"""Ends of the names of output matrices."""


def find_unused(
    sources: Sequence[ShardManifest], destinations: Iterable[ShardManifest]
) -> frozenset[str]:
    """Return the tensors of `sources` that no destination needs.

    Tied weights are one tensor with several names: a destination that has one of the names needs the tensor.
    """
    held: dict[str, set[str]] = {}
    for manifest in sources:
        for spec in manifest.tensors:
            held.setdefault(spec.name, {spec.name})
    for manifest in sources:
        for alias, target in manifest.aliases.items():
            held[target].add(alias)
            if alias in held:
                held[alias].add(target)
    for manifest in destinations:
        if not held:
            break
        taken = {spec.name for spec in manifest.tensors} | manifest.aliases.keys()
        held = {name: names for name, names in held.items() if taken.isdisjoint(names)}
    return frozenset(held)


def find_kept(
    sources: Sequence[ShardManifest],
    destinations: Sequence[ShardManifest],
    patterns: Collection[str],
) -> frozenset[str]:
    """Return the destination tensors that no source has and that match one of `patterns` (`fnmatch`).

    Raises:
        ManifestError, UnsupportedLayout: see `resolve_names`.
    """
    names = resolve_names(sources, destinations)
    # An alias of a destination is not a separate tensor.
    own = {spec.name for manifest in destinations for spec in manifest.tensors}
    missing = (name for name in own if names.class_of[names.index[name]] < 0)
    return frozenset(n for n in missing if any(fnmatchcase(n, p) for p in patterns))


def refuse_unused(
    unused: Collection[str], allowed: Collection[str], sources: Sequence[ShardManifest]
) -> None:
    """Check that engines need every trainer tensor, except harmless tensors and allowed tensors.

    Three kinds of tensors are harmless: MTP layers, an MTP layer's copies of the model's embedding and output matrix,
    and tables that every engine computes itself (rotary embeddings).

    Args:
        unused: names of the trainer tensors that no engine needs, from `find_unused`.
        allowed: patterns of `fnmatch` for names that the user allows.
        sources: manifests of the trainers.

    Raises:
        ManifestError: other tensors are unused; the message lists them.
    """
    names = (spec.name for manifest in sources for spec in manifest.tensors)
    layers = {name.removesuffix(_MTP_MARK[1:]) for name in names if name.endswith(_MTP_MARK)}
    unused_layers = tuple(layer for layer in layers if layer + _MTP_MARK[1:] in unused)
    copies = {layer + end for layer in layers for end in _SHARED_BY_MTP}
    refused = sorted(
        name
        for name in unused
        if not _HARMLESS.search(name)
        and not name.startswith(unused_layers)
        and name not in copies
        and not any(fnmatchcase(name, pattern) for pattern in allowed)
    )
    if not refused:
        return
    raise ManifestError(
        f"allow_unused: no engine takes {said(refused)}{''.join(_tie_hints(refused, sources))}, and no pattern of "
        f"allow_unused allows this; serve the model that is "
        f"trained, or, if no engine needs {'this tensor' if len(refused) == 1 else 'these tensors'}, pass this to the "
        f"trainer: allow_unused={as_argument(refused)}"
    )


def _tie_hints(refused: Collection[str], sources: Sequence[ShardManifest]) -> Iterator[str]:
    """Yield a hint if trainers have a separate output matrix, but engines use the embedding as output matrix."""
    shapes = {spec.name: spec.shape for manifest in sources for spec in manifest.tensors}
    for head in (name for name in refused if name.endswith(_HEADS)):
        for name, shape in shapes.items():
            if "embed" in name and shape == shapes[head] and name not in refused:
                yield (
                    f" (engines use {name!r} in place of {head!r}, and the trainers hold them as two separate "
                    "tensors: keep the two tied in training, or serve the model with tie_word_embeddings=false)"
                )
                return
