"""Write docs/capabilities.md.

Its sources are docs/capabilities.json, which the tests of live engines write, the schemes in
`windlass.layout.quantization`, and the kernels and releases in each engine's `spec.py`.

`render_capabilities.py` writes the page; `render_capabilities.py --check` fails if the page is outdated.
"""

from __future__ import annotations

import json
import sys
import textwrap
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
OTHER_COLUMNS = [
    ("xccl", "in_place"),
    ("xccl", "staged"),
    ("disk", "in_place"),
    ("disk", "staged"),
]
CALLBACK_COLUMNS = [("callback xccl", "staged"), ("callback disk", "staged")]
HEAD = """# What works with which engine

`tools/render_capabilities.py` makes this page from `docs/capabilities.json`, which `make test-engines` writes. Do not edit it by hand.
In every row a real trainer trains a step and publishes into a live, unmodified server on CPU. The trainer has two processes, or four with two
axes of `fsdp2`. The server was in another fleet before. `proven` means that after the update

1. every byte of every parameter and buffer, on every rank, equals a new model into which the engine's own loader loaded the same
   weights from a checkpoint,
2. every greedy token is the best one of transformers within bfloat16,
3. logprobs agree with transformers within bfloat16,
4. for `moe` and `mla`, a fresh server of the last of these checkpoints had the same bytes, tokens and logprobs.

`refused` means that Windlass refuses the combination with a reason, and `untested` that no test runs it.

Models are tiny and made from a configuration: `dense` and `tied` (Qwen3), `moe` (Qwen3-MoE), `mla` (DeepSeek-V3's attention and
experts; from Megatron-core with torch's attention in its layer spec). For two models the engine's loader computes some tensors:
`offset` (Gemma: norms of weight + 1, in SGLang) and `recurrent` (Falcon-H1: A = -exp(A_log) of its state space layers, in vLLM).
GPUs have a separate table. Engine ranks: `tp` tensor-parallel ranks, `pp` stages, `dp` replicas of one server, `ep` ranks that
share the experts. With `pp` and `dp`, updates arrive while requests run on every replica, and each replica must pass (2) and (3).
Builds for CPUs lack some code for `ep` and `pp`; the tests replace it (engine-adapters.md).

Trainer ranks: each axis has two ranks. `replicate2 dp2` is HSDP. FSDP2 shards over `dp` or `cp`, and the ranks of `cp` split each sequence.
`cma` and `mooncake` are transports of the backend `p2p`; `xccl` broadcasts with gloo.
"""

QUANTISED = """
## Quantised engines

Trainers with parameters of these types quantise while they pack, to the scheme of the checkpoint. The table comes from
`windlass.layout.quantization.CAPABILITIES`. Launchers read config.json and refuse other schemes before the engine starts.

| scheme | types of trainers | outcome |
|---|---|---|
"""
LAYOUT_HEAD = """
Layouts of block float8 that the engines' kernels need, from the engines' sources. In each case the capture of every rank
proves its layout bit for bit, or names the layout and refuses it.

| engine | kernels | layout in memory | outcome |
|---|---|---|---|
"""
_LIVE = "proven: every tensor and the tokens equal a fresh load (docs/measured-gpu.md)"
_POWERS = "untested: scales become powers of two, which capture leaves to the engine's loader"
LAYOUTS = (
    ("SGLang 0.5.16", "Triton, Hopper (SGLANG_ENABLE_JIT_DEEPGEMM=0)", "as in the checkpoint", "proven: every tensor and the tokens equal a fresh load (docs/measured-gpu.md)"),
    ("SGLang 0.5.16", "DeepGEMM, Hopper", "as in the checkpoint", "untested"),
    ("SGLang 0.5.23", "CPU", "packed for AMX", "untested: the kernels need a CPU with AMX tiles"),
    ("SGLang", "DeepGEMM, Blackwell", "requantised", "untested: scales become powers of two, which capture leaves to the engine's loader"),
    ("SGLang", "latent attention", "kv_b_proj dequantised to bfloat16", "untested live: capture leaves it to the engine's loader"),
    ("vLLM 0.24", "CUTLASS and Triton, Hopper (Windlass's default)", "as in the checkpoint", _LIVE),
    ("vLLM 0.24", "DeepGEMM, Hopper", "requantised", _POWERS),
    ("vLLM 0.24", "DeepGEMM with VLLM_USE_DEEP_GEMM_E8M0=0", "scales by columns", "untested"),
    ("vLLM 0.24", "Marlin, FlashInfer", "repacked or reordered", "untested"),
    ("vLLM 0.32", "CPU", "packed for AMX", "untested: the kernels need a CPU with AMX tiles"),
    ("vLLM", "DeepGEMM, Blackwell", "requantised", _POWERS),
    ("vLLM", "latent attention", "kv_b_proj dequantised to bfloat16", "untested live: capture leaves it to the engine's loader"),
)  # fmt: skip
"""Release, kernels and device, layout in memory compared with the checkpoint, outcome."""
RELEASES = """
## Releases

From `EngineSpec.releases`, which was compiled from the sources of these releases. A launcher refuses older releases, warns of
releases that were never updated while they served, and lists the features that its engine lacks. `windlass doctor` does the same.
"""
HEAD_CALLBACK = """\
Trainers drive these updates by [`RolloutCallback`](backends.md#updates-that-a-trainer-drives-itself), two versions each, beside running
requests. `xccl` broadcasts whole tensors with gloo, and `disk` reads the trainers' checkpoint. (4) holds for `megatron pp2`, in which
both stages are leaders. A leader that was killed in an update left no mixture
(`tests/engines/test_live_callback.py`).
"""
OUTSIDE = "mooncake (sglang's table)"
HEAD_OUTSIDE = """
## Without Windlass in the server

Trainers write through [SGLang's own weight table](integrations/sglang.md#without-windlass-in-the-server). `proven` means that
after several versions SGLang's own checksums of all parameters, and greedy tokens with their logprobs, equal those of a fresh
server that loaded the trainers' checkpoint.

| engine | version | model | engine ranks | trainer | dtype | mode | outcome |
|---|---|---|---|---|---|---|---|
"""
HEAD_SETTINGS = """
## Settings

Settings of live servers on CPU that were updated in both modes. The last column says what the test compared.

| engine | setting | comparison |
|---|---|---|
"""
HEAD_GPUS = """
## On GPUs

Recorded by `benchmarks/gpu/prove_live_engine.py` (`benchmarks/results/`), with updates in both modes. `proven` means that after each
update every tensor of every rank has the same fingerprint as in a fresh server of the same release that loaded the trainers' checkpoint,
and that greedy tokens are equal. A setting that ran several times has its newest outcome.

| engine | model | engine ranks | trainer | transport | tensors | outcome |
|---|---|---|---|---|---|---|
"""

Row = dict[str, str]


def render(rows: Sequence[Row], proofs: Sequence[dict[str, Any]]) -> str:
    """Return the page; `proofs` are the records of GPUs."""
    parts = [HEAD]
    columns = COLUMNS + OTHER_COLUMNS + CALLBACK_COLUMNS
    tested = [r for r in rows if (r["transport"], r["mode"]) in columns]
    for engine, version in sorted({(r["engine"], r["engine_version"]) for r in tested}):
        chosen = [r for r in tested if (r["engine"], r["engine_version"]) == (engine, version)]
        counted = Counter(r["outcome"] for r in chosen)
        summary = ", ".join(f"{counted[o]} {o}" for o in ("proven", "refused", "untested"))
        parts.append(f"\n## {engine} {version}\n\n{summary}.\n\n{_table(chosen, COLUMNS)}")
        if others := _table(chosen, OTHER_COLUMNS):
            parts.append(f"\nBackends other than `p2p`:\n\n{others}")
        if driven := _table(chosen, CALLBACK_COLUMNS):
            parts.append(f"\n{HEAD_CALLBACK}\n{driven}")
    parts.append(HEAD_OUTSIDE)
    parts += [
        f"| {' | '.join([r['engine'], r['engine_version'], *_place(r), r['mode'], r['outcome']])} |\n"
        for r in rows
        if r["transport"] == OUTSIDE
    ]
    parts.append(HEAD_SETTINGS)
    parts += sorted(
        f"| {r['engine']} {r['engine_version']} | {r['mode']} | {r['detail']} |\n"
        for r in rows
        if r["outcome"] == "proven" and r["detail"]
    )
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
    outcome = row["outcome"]
    if outcome != "proven":
        outcome += f": {textwrap.shorten(row['detail'], 120)}"
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


def _table(rows: Sequence[Row], columns: Sequence[tuple[str, str]]) -> str:
    """Return a table of the rows in these columns, or an empty text if there are none."""
    cells = {
        (*_place(r), *column): r["outcome"]
        for r in rows
        if (column := (r["transport"], r["mode"])) in columns
    }
    lines = [
        "| model | engine ranks | trainer | dtype | "
        + " | ".join(f"{transport} {mode}" for transport, mode in columns)
        + " |\n",
        "|" + "---|" * (4 + len(columns)) + "\n",
    ]
    for place in sorted({key[:4] for key in cells}):
        outcomes = [cells.get((*place, *column), "untested") for column in columns]
        lines.append(f"| {' | '.join([*place, *outcomes])} |\n")
    return "".join(lines) if cells else ""


def _place(row: Row) -> tuple[str, str, str, str]:
    return row["model"], row["engine_parallelism"], row["trainer"], row["dtype"]


def _newest_proofs() -> list[dict[str, Any]]:
    """Return the newest record of each setting. Of two records of one day, the record in the last file by name counts."""
    files = sorted(ROOT.glob(PROOFS), key=lambda file: (file.stem[-len("2026-11-29") :], file.stem))
    setting = ("engine", "engine_version", "case", "engine_ranks", "trainer", "transport")
    rows = (row for file in files for row in json.loads(file.read_text()))
    return [*{tuple(row[part] for part in setting): row for row in rows}.values()]


def main() -> int:
    """Write the page, or with --check return 1 if it is outdated."""
    text = render(json.loads((DOCS / "capabilities.json").read_text()), _newest_proofs())
    page = DOCS / "capabilities.md"
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
        return 0
    same = page.exists() and page.read_text() == text
    if not same:
        sys.stderr.write(f"{page} is outdated: run python tools/render_capabilities.py\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
