"""docs/capabilities.md out of what the live engine tests recorded in docs/capabilities.json, of the
tables of schemes and kernels in `windlass.layout.quantization`, and of what every engine's `spec.py` says of its kernels and releases.

`render_capabilities.py` writes the page, `render_capabilities.py --check` fails if it is not the
one that the records give.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.engines.spec import ENGINES
from windlass.engines.versions import EngineReleases, Feature
from windlass.layout.quantization import CAPABILITIES, Capability

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PROOFS = "benchmarks/results/prove_live_engine_*.json"
COLUMNS = [
    ("cma", "in_place"),
    ("cma", "staged"),
    ("mooncake", "in_place"),
    ("mooncake", "staged"),
]
HEAD = """# What works with which engine

Made by `tools/render_capabilities.py` from `docs/capabilities.json`, which `make test-engines` writes;
not edited by hand. Every row is a real trainer of two processes that trains a step and publishes into
a live unmodified server on CPU, which has left another fleet for this one; `proven` means that
afterwards (1) every byte of every parameter and buffer, on every rank, equals what the engine's own
loader makes of the same weights, saved as a checkpoint, in a new model, (2) every greedy token is the
best one of transformers within bfloat16, (3) logprobs agree with transformers within bfloat16; and,
for `moe` and `mla`, that a fresh server of the last of these checkpoints held the same bytes and gave
the same tokens and logprobs. `refused` means that it is turned down with a reason; `untested` means what it says. Models
are tiny and made from a configuration: `dense` and `tied` (Qwen3), `moe` (Qwen3-MoE), `mla`
(DeepSeek-V3's attention and experts; from Megatron-core with torch's attention in its layer spec), and two of which
the engine's loader computes tensors: `offset` (Gemma: norms of weight + 1, in SGLang) and `recurrent` (Falcon-H1: A =
-exp(A_log) of its state space layers, in vLLM).
Machines with GPUs have a table of their own. Engine ranks: `tp` tensor-parallel ranks, `pp` stages, `dp` replicas of one server,
`ep` ranks over which experts are spread. With `pp` and `dp`, updates come while requests run on every replica,
and (2) and (3) hold for each; what builds for CPUs lack for `ep` and `pp` the tests put in its place (engine-adapters.md).
"""

QUANTISED = """
## Quantised engines

Trainers in the types named quantise while they pack, to a checkpoint's own scheme; from
`windlass.layout.quantization.CAPABILITIES`. Launchers read config.json and refuse before the engine starts.

| scheme | trainers hold | outcome |
|---|---|---|
"""
LAYOUT_HEAD = """
How an engine's kernels want block float8; read in the engines' sources. Whatever the table says, every
rank's capture proves its layout bit for bit or refuses it by name.

| engine | kernels | layout in memory | outcome |
|---|---|---|---|
"""
_LIVE = "proven: every tensor and the tokens are those of a fresh load (docs/measured-gpu.md)"
_POWERS = "untested: scales become powers of two, which capture leaves to the engine's loader"
LAYOUTS = (
    ("SGLang 0.5.16", "Triton, Hopper (SGLANG_ENABLE_JIT_DEEPGEMM=0)", "as in the checkpoint", "proven: every tensor and the tokens are those of a fresh load (docs/measured-gpu.md)"),
    ("SGLang 0.5.16", "DeepGEMM, Hopper", "as in the checkpoint", "untested"),
    ("SGLang 0.5.23", "CPU", "packed for AMX", "untested: the kernels need a CPU with AMX tiles"),
    ("SGLang", "DeepGEMM, Blackwell", "requantised", "untested: scales become powers of two, which capture leaves to the engine's loader"),
    ("SGLang", "latent attention", "kv_b_proj dequantised to bfloat16", "untested live: capture leaves it to the engine's loader"),
    ("vLLM 0.24", "CUTLASS and Triton, Hopper (the launcher's default)", "as in the checkpoint", _LIVE),
    ("vLLM 0.24", "DeepGEMM, Hopper", "requantised", _POWERS),
    ("vLLM 0.24", "DeepGEMM with VLLM_USE_DEEP_GEMM_E8M0=0", "scales by columns", "untested"),
    ("vLLM 0.24", "Marlin, FlashInfer", "repacked or reordered", "untested"),
    ("vLLM 0.32", "CPU", "packed for AMX", "untested: the kernels need a CPU with AMX tiles"),
    ("vLLM", "DeepGEMM, Blackwell", "requantised", _POWERS),
    ("vLLM", "latent attention", "kv_b_proj dequantised to bfloat16", "untested live: capture leaves it to the engine's loader"),
)  # fmt: skip
"""Release, kernels and device, layout in memory against the checkpoint, what is known of it."""
RELEASES = """
## Releases

From `EngineSpec.releases`; read in the sources of the releases named. A launcher refuses an older one, warns of
one that was never updated while it served, and says what the one that it starts lacks; so does `windlass doctor`.
"""
HEAD_GPUS = """
## On GPUs

Out of what `benchmarks/gpu/prove_live_engine.py` recorded (`benchmarks/results/`): updates
in both modes; `proven` means that after either every tensor of every rank has the fingerprint that it has in a fresh
server of the same release, which loaded the trainers' checkpoint, and that greedy tokens are equal.

| engine | model | engine ranks | trainer | transport | tensors | outcome |
|---|---|---|---|---|---|---|
"""

Row = dict[str, str]


def render(rows: Sequence[Row], proofs: Sequence[dict[str, Any]]) -> str:
    """The page; `proofs` are of GPUs."""
    parts = [HEAD]
    tested = [r for r in rows if (r["transport"], r["mode"]) in COLUMNS]
    for engine, version in sorted({(r["engine"], r["engine_version"]) for r in tested}):
        chosen = [r for r in tested if (r["engine"], r["engine_version"]) == (engine, version)]
        counted = Counter(r["outcome"] for r in chosen)
        summary = ", ".join(f"{counted[o]} {o}" for o in ("proven", "refused", "untested"))
        parts.append(f"\n## {engine} {version}\n\n{summary}.\n\n{_table(chosen)}")
    parts.append(HEAD_GPUS)
    parts += sorted(_proof(row) for row in proofs)
    refused = sorted(
        (r["engine"], r["engine_version"], r["model"], r["mode"], r["detail"])
        for r in rows
        if r["outcome"] == "refused"
    )
    if refused:
        parts.append(
            "\n## Refused, and why\n\n| engine | model | what | reason |\n|---|---|---|---|\n"
        )
        parts += [
            f"| {engine} {version} | {model} | {what} | {reason} |\n"
            for engine, version, model, what, reason in refused
        ]
    parts += [QUANTISED, *(_scheme(row) for row in CAPABILITIES)]
    engines = [ENGINES.find(name) for name in ENGINES.names()]
    parts += [LAYOUT_HEAD, *(f"| {' | '.join(layout)} |\n" for layout in LAYOUTS)]
    parts.append(RELEASES)
    parts += [_releases(engine.releases) for engine in engines if engine.releases is not None]
    return "".join(parts)


def _proof(row: dict[str, Any]) -> str:
    outcome = row["outcome"] if row["outcome"] == "proven" else f"{row['outcome']}: {row['detail']}"
    cells = [f"{row['engine']} {row['engine_version']}", row["case"], row["engine_ranks"]]
    cells += [row["trainer"], row["transport"], str(row["num_tensors"]), outcome]
    row_of_page = " | ".join(cell.replace("|", r"\|") for cell in cells)
    return f"| {row_of_page} |\n"


def _releases(engine: EngineReleases) -> str:
    spelt = [".".join(map(str, release)) for release in engine.read]
    shown = [engine.run.get(release, "no") for release in engine.read]
    lines = [
        f"\n| {engine.name} | {' | '.join(spelt)} | without it |\n",
        "|" + "---|" * (len(spelt) + 2) + "\n",
        f"| updated while it served, on | {' | '.join(shown)} | |\n",
    ]
    for feature in engine.features:
        cells = ["yes" if release >= feature.since else "no" for release in engine.read]
        lines.append(f"| {feature.name} | {' | '.join(cells)} | {_without(feature)} |\n")
    return "".join(lines)


def _without(feature: Feature) -> str:
    if feature.needed:
        return f"refused: {feature.without}"
    return feature.without or "nothing that updates use"


def _scheme(row: Capability) -> str:
    sources = ", ".join(row.source_dtypes) or "-"
    outcome = "supported" if row.supported else f"refused: {row.reason}"
    return f"| {row.scheme} | {sources} | {outcome} |\n"


def _table(rows: Sequence[Row]) -> str:
    cells = {(*_place(r), r["transport"], r["mode"]): r["outcome"] for r in rows}
    lines = [
        "| model | engine ranks | trainer | dtype | "
        + " | ".join(f"{transport} {mode}" for transport, mode in COLUMNS)
        + " |\n",
        "|" + "---|" * (4 + len(COLUMNS)) + "\n",
    ]
    for place in sorted({_place(row) for row in rows}):
        outcomes = [cells.get((*place, *column), "untested") for column in COLUMNS]
        lines.append(f"| {' | '.join([*place, *outcomes])} |\n")
    return "".join(lines)


def _place(row: Row) -> tuple[str, str, str, str]:
    return row["model"], row["engine_parallelism"], row["trainer"], row["dtype"]


def main() -> int:
    """Write the page, or compare it."""
    proofs = [row for file in sorted(ROOT.glob(PROOFS)) for row in json.loads(file.read_text())]
    text = render(json.loads((DOCS / "capabilities.json").read_text()), proofs)
    page = DOCS / "capabilities.md"
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
        return 0
    same = page.exists() and page.read_text() == text
    if not same:
        sys.stderr.write(f"{page} must be made anew: python tools/render_capabilities.py\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
