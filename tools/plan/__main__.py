"""Print the plan of an update and its estimated time: `python -m tools.plan TOPOLOGY.toml`."""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tools.plan.cost import CostEstimate, LinkSummary, predict, summarize_links
from tools.plan.reports import PlannedTransfer, num_writes, plan_with_reports
from tools.plan.simulate import SimulatedWire, simulate_wire
from tools.plan.simulate_relay import SimulatedRelay, simulate_relay
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import Topology, parse_topology
from windlass.config import P2pBackend, RelayShape
from windlass.errors import ConfigError, WindlassError
from windlass.planning.plan import CopyMode, Reason, TransferPlan
from windlass.planning.planner import PlanPolicy
from windlass.planning.relay import RelayGroup, stripes_of
from windlass.transfer.base import LINKS_AT_ONCE

__all__ = ["add_arguments", "run"]

_WHY = {
    Reason.CONTIGUOUS: "contiguous on both sides",
    Reason.LONG_RUNS: "strided, in runs long enough to write one by one",
    Reason.SOURCE_STRIDED: "the source is strided",
    Reason.CAST: "the dtypes differ",
    Reason.DESTINATION_STRIDED: "the destination is strided",
    Reason.QUANTIZED: "quantised on the way",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    topology: Topology
    planned: PlannedTransfer
    cost: CostEstimate
    links: LinkSummary
    plan_seconds: float
    peak_rss_bytes: int
    simulated: SimulatedWire | None
    relayed: SimulatedRelay | None
    simulate_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("topology", type=Path, help="TOML file, see examples/topologies")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--direct-min-run-bytes",
        type=int,
        default=PlanPolicy().direct_min_run_bytes,
        metavar="N",
        help="strided runs of at least N bytes are written without packing (default: %(default)s)",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="simulate the plan on the modelled fabric, link by link, see docs/simulation.md",
    )
    parser.add_argument(
        "--links-at-once",
        type=int,
        default=LINKS_AT_ONCE,
        metavar="N",
        help="with --simulate: links that a trainer writes in parallel (default: %(default)s)",
    )
    parser.add_argument(
        "--relay",
        choices=[shape.value for shape in RelayShape],
        default=RelayShape.OFF.value,
        help="with --simulate: route of a relay among the replicas (default: off)",
    )


def run(args: argparse.Namespace) -> int:
    """Plan the topology and print the result.

    Raises:
        ConfigError: the file cannot be read or does not describe a topology.
        PlanError: the two sides do not match.
    """
    try:
        text = args.topology.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"topology: cannot read {args.topology}: {error}") from error
    if args.links_at_once < 1:
        raise ConfigError(f"--links-at-once must be >= 1, got {args.links_at_once}")
    if not args.simulate and (args.relay != RelayShape.OFF or args.links_at_once != LINKS_AT_ONCE):
        raise ConfigError("--relay and --links-at-once must go with --simulate, got none")
    links_at_once = args.links_at_once if args.simulate else 0
    topology, shape = parse_topology(text), RelayShape(args.relay)
    measured = _measure(topology, args.direct_min_run_bytes, links_at_once, shape)
    _show(measured, Console(markup=False))
    if args.json is not None:
        try:
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(_figures(measured))))
        except OSError as error:
            raise ConfigError(f"--json: cannot write {args.json}: {error}") from error
    return 0


def _measure(
    topology: Topology, direct_min_run_bytes: int, links_at_once: int, shape: RelayShape
) -> _Measured:
    policy = PlanPolicy(direct_min_run_bytes=direct_min_run_bytes)
    sources, destinations = trainer_manifests(topology), engine_manifests(topology)
    gc.collect()
    started = time.perf_counter()
    planned = plan_with_reports(sources, destinations, policy)
    plan_seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, simulated, relayed = time.perf_counter(), None, None
    if links_at_once:
        relayed = _relay(topology, policy, links_at_once, shape)
        simulated = simulate_wire(planned.plan, topology.fabric, links_at_once=links_at_once)
    return _Measured(
        topology=topology,
        planned=planned,
        cost=predict(planned.plan, topology.fabric, planned.routing),
        links=summarize_links(planned.plan),
        plan_seconds=plan_seconds,
        peak_rss_bytes=peak if sys.platform == "darwin" else peak * 1024,
        simulated=simulated,
        relayed=relayed,
        simulate_seconds=time.perf_counter() - started,
    )


def _relay(
    topology: Topology, policy: PlanPolicy, links_at_once: int, shape: RelayShape
) -> SimulatedRelay | None:
    """Simulate the slowest group; trainers send to it at the rate of one replica. Return None without a relay."""
    stripes = stripes_of(shape, topology.engine.replicas)
    if not stripes:
        return None
    engine = msgspec.structs.replace(topology.engine, replicas=1)
    destinations = engine_manifests(msgspec.structs.replace(topology, engine=engine))
    plan = plan_with_reports(trainer_manifests(topology), destinations, policy).plan
    fed = simulate_wire(plan, topology.fabric, links_at_once=links_at_once)
    slowest = int(fed.destination_finish_s.argmax())
    members = tuple(f"replica{index}" for index in range(topology.engine.replicas))
    return simulate_relay(
        RelayGroup(members, stripes, P2pBackend().relay_chunk_nbytes),
        nbytes=int(plan.ops.nbytes[plan.ops.dst == slowest].sum()),
        fed_s=float(fed.destination_finish_s[slowest]),
        nic_gbytes_per_s=topology.fabric.nic_gbytes_per_s,
        verify_gbytes_per_s=topology.fabric.pack_gbytes_per_s,
    )


def _figures(measured: _Measured) -> dict[str, Any]:
    plan, cost, links = measured.planned.plan, measured.cost, measured.links
    coverage, routing = measured.planned.coverage, measured.planned.routing
    return {
        "topology": measured.topology.name,
        "plan_seconds": measured.plan_seconds,
        "peak_rss_bytes": measured.peak_rss_bytes,
        "coverage": coverage.fraction,
        "imbalance": routing.imbalance,
        "num_ops": {m.name.lower(): int((plan.ops.mode == m).sum()) for m in CopyMode},
        "num_writes": num_writes(plan),
        "predicted_wire_s": cost.wire_s,
        "bottleneck": cost.bottleneck,
        "lower_bound_s": cost.lower_bound_s,
        "nbytes": plan.nbytes,
        "nbytes_by_mode": {m.name.lower(): n for m, n in coverage.by_mode.items()},
        "nbytes_by_reason": {r.name.lower(): n for r, n in coverage.by_reason.items()},
        "egress_max_bytes": int(routing.egress.max()),
        "egress_lower_bound_bytes": routing.lower_bound,
        "unused_tensors": len(coverage.unused_tensors),
        "links": {
            "num_links": links.num_links,
            "min_bytes": links.min_nbytes,
            "median_bytes": links.median_nbytes,
            "max_bytes": links.max_nbytes,
        },
        "plan_digest": plan.digest(),
        **(
            {"simulated": _simulated_figures(measured.simulated, cost)}
            if measured.simulated
            else {}
        ),
        **({"relayed_wire_s": measured.relayed.wire_s} if measured.relayed else {}),
    }


def _simulated_figures(simulated: SimulatedWire, cost: CostEstimate) -> dict[str, Any]:
    return {
        "wire_s": simulated.wire_s,
        "lower_bound_s": cost.lower_bound_s,
        "fraction_of_lower_bound": cost.lower_bound_s / simulated.wire_s,
        "link_finish_s": {
            "p50": simulated.percentile_s(50),
            "p99": simulated.percentile_s(99),
            "max": simulated.wire_s,
        },
        "destination_finish_s": {
            "min": float(simulated.destination_finish_s.min()),
            "max": float(simulated.destination_finish_s.max()),
        },
        "loads": {
            load.kind: {"num_used": load.num_used, "max": load.max, "mean": load.mean}
            for load in simulated.loads
        },
        "num_events": simulated.num_events,
    }


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def _show(measured: _Measured, console: Console) -> None:
    console.print(_summary(measured))
    console.print(_modes(measured.planned.plan))
    console.print(_heaviest(measured.links))
    if measured.simulated is not None:
        console.print(_simulated(measured.simulated, measured))
    unused = measured.planned.coverage.unused_tensors
    if unused:
        console.print(f"{len(unused)} trainer tensor(s) that no engine uses, first: {unused[0]}")


def _summary(measured: _Measured) -> Table:
    plan, cost, links = measured.planned.plan, measured.cost, measured.links
    coverage, routing = measured.planned.coverage, measured.planned.routing
    summary = Table(title=measured.topology.name, show_header=False, title_justify="left")
    sizes = (_size(links.min_nbytes), _size(links.median_nbytes), _size(links.max_nbytes))
    rows = (
        ("ranks", f"{len(plan.sources)} trainer -> {len(plan.destinations)} engine"),
        ("bytes per update", f"{_size(plan.nbytes)}, coverage {coverage.fraction:.2%}"),
        (
            "links",
            f"{links.num_links}, min / median / max {' / '.join(sizes)}",
        ),
        (
            "busiest sender",
            f"{_size(float(routing.egress.max()))}, {routing.imbalance:.4f} of the lower bound",
        ),
        (
            "lower bound",
            f"{_size(routing.lower_bound)}, proven by {len(routing.certificate)} sender(s)",
        ),
        ("writes", f"{num_writes(plan):,} in {len(plan.ops):,} ops"),
        ("staging memory", _size(sum(plan.staging_nbytes))),
        ("predicted wire", f"{cost.wire_s:.4g} s, bottleneck: {cost.bottleneck}"),
        ("wire lower bound", f"{cost.lower_bound_s:.4g} s under any routing"),
        ("planned in", f"{measured.plan_seconds:.2f} s, peak RSS {_size(measured.peak_rss_bytes)}"),
    )
    for name, value in rows:
        summary.add_row(name, value)
    return summary


def _modes(plan: TransferPlan) -> Table:
    modes = Table(title="op modes", title_justify="left")
    for column in ("mode", "why", "ops", "bytes"):
        modes.add_column(column, justify="right" if column in ("ops", "bytes") else "left")
    for mode in CopyMode:
        for reason in Reason:
            chosen = (plan.ops.mode == mode) & (plan.ops.reason == reason)
            if chosen.any():
                nbytes = float(plan.ops.nbytes[chosen].sum())
                modes.add_row(
                    mode.name.lower(), _WHY[reason], f"{int(chosen.sum()):,}", _size(nbytes)
                )
    return modes


def _heaviest(links: LinkSummary) -> Table:
    heaviest = Table(title="heaviest links", title_justify="left")
    for column in ("from", "to", "bytes"):
        heaviest.add_column(column, justify="right" if column == "bytes" else "left")
    for source, destination, nbytes in links.heaviest:
        heaviest.add_row(source, destination, _size(nbytes))
    return heaviest


def _simulated(simulated: SimulatedWire, measured: _Measured) -> Table:
    bound, ends = measured.cost.lower_bound_s, simulated.destination_finish_s
    table = Table(title="simulated wire phase", show_header=False, title_justify="left")
    rows = [
        ("wire", f"{simulated.wire_s:.4g} s; the lower bound {bound:.4g} s is {bound / simulated.wire_s:.1%} of it"),
        (
            "links end",
            f"p50 {simulated.percentile_s(50):.4g} s, p99 {simulated.percentile_s(99):.4g} s",
        ),
        (
            "engine ranks full",
            f"first {ends.min():.4g} s, last {ends.max():.4g} s",
        ),
    ]  # fmt: skip
    rows += [
        (f"load, {load.kind}", f"max {load.max:.1%}, mean {load.mean:.1%} of {load.num_used} used")
        for load in simulated.loads
    ]
    if measured.relayed is not None:
        rows.append(("wire with a relay", f"{measured.relayed.wire_s:.4g} s"))
    rows.append(("simulated in", f"{measured.simulate_seconds:.2f} s"))
    for name, value in rows:
        table.add_row(name, value)
    return table


def main() -> int:
    """Run the command. Print an error of Windlass in one line; other errors are bugs and show a traceback."""
    parser = argparse.ArgumentParser(prog="python -m tools.plan", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except WindlassError as error:
        print(f"plan: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
