"""Which release of SGLang has what."""

from __future__ import annotations

from windlass.engines.versions import EngineReleases, Feature

__all__ = ["RELEASES", "REPLICAS"]

REPLICAS = Feature(
    "ranks that know their replica (`dp_rank` of `get_parallel()`)",
    since=(0, 5, 22),
    missing_in=(0, 5, 21),
    without="`--dp` is refused",
)

RELEASES = EngineReleases(
    name="SGLang",
    package="sglang",
    distributions=("sglang",),
    read=((0, 5, 6), (0, 5, 7), (0, 5, 16), (0, 5, 19), (0, 5, 21), (0, 5, 22), (0, 5, 23)),
    run={(0, 5, 16): "GPUs", (0, 5, 23): "CPUs"},
    features=(
        Feature(
            "`--custom-weight-loader`",
            since=(0, 4, 10),
            without="nothing can be run in its ranks",
            needed=True,
        ),
        Feature(
            "`/update_weight_version` without aborting",
            since=(0, 5, 2),
            missing_in=(0, 4, 10),
            without="the version that it serves cannot be stamped",
            needed=True,
        ),
        Feature(
            "`/pause_generation` with `abort`, `retract`, `in_place`",
            since=(0, 5, 6),
            missing_in=(0, 5, 5),
            without="its pause has no modes",
            needed=True,
        ),
        Feature(
            "weight version per token",
            since=(0, 5, 19),
            missing_in=(0, 5, 18),
            without="all tokens of an answer carry one version, also where an update came between",
        ),
        Feature(
            "sessions (`/begin_weight_update`, `/end_weight_update`)",
            since=(0, 5, 21),
            missing_in=(0, 5, 20),
        ),
        REPLICAS,
    ),
)
