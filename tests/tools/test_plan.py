"""`python -m tools.plan`: its figures agree with the plan, and its errors are one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from msgspec import structs

from tools.plan import __main__ as plan_command
from tools.plan.cost import predict, summarize_links
from tools.plan.reports import num_writes, plan_with_reports
from tools.plan.synthesis import engine_manifests, trainer_manifests
from tools.plan.topology import Fabric, parse_topology
from windlass.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "examples" / "topologies" / "qwen3-30b-a3b-4-to-4.toml"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Provide the shipped topology with fewer layers; the first test plans all layers."""
    path = tmp_path / "small.toml"
    path.write_text(SHIPPED.read_text().replace("num_hidden_layers = 48", "num_hidden_layers = 4"))
    return path


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_plan_command_prints_the_figures_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert plan_command.run(arguments(str(SHIPPED), "--json", str(out))) == 0
    figures = json.loads(out.read_text())
    topology = parse_topology(SHIPPED.read_text())
    planned = plan_with_reports(trainer_manifests(topology), engine_manifests(topology))
    assert figures["coverage"] == 1.0
    assert 1.0 <= figures["imbalance"] <= 1.02
    assert figures["num_writes"] == num_writes(planned.plan)
    assert sum(figures["num_ops"].values()) == len(planned.plan.ops)
    assert set(figures["num_ops"]) == {"direct", "packed", "scatter"}
    assert figures["plan_digest"] == planned.plan.digest()
    assert figures["plan_seconds"] > 0
    assert figures["peak_rss_bytes"] > 1 << 20
    busiest = int(planned.routing.egress.max())
    assert figures["predicted_wire_s"] == pytest.approx(busiest / 50e9)
    printed = capsys.readouterr().out
    assert "100.00%" in printed
    assert figures["bottleneck"] in printed


def test_a_simulation_is_printed_and_written(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert plan_command.run(arguments(str(small), "--simulate", "--json", str(out))) == 0
    figures = json.loads(out.read_text())["simulated"]
    assert figures["wire_s"] >= figures["lower_bound_s"] * 0.999
    assert figures["link_finish_s"]["p50"] <= figures["link_finish_s"]["p99"] <= figures["wire_s"]
    assert figures["loads"]["NIC egress"]["max"] <= 1.001
    assert "simulated wire phase" in capsys.readouterr().out
    assert plan_command.run(arguments(str(small), "--json", str(out))) == 0
    assert "simulated" not in json.loads(out.read_text())


def test_relaying_replicas_take_little_longer_than_one_engine(small: Path, tmp_path: Path) -> None:
    text = small.read_text().replace("replicas = 1", "replicas = 8")
    topology, out = tmp_path / "eight.toml", tmp_path / "plan.json"
    topology.write_text(text)
    words = ("--simulate", "--relay", "tree", "--json", str(out))
    assert plan_command.run(arguments(str(topology), *words)) == 0
    figures = json.loads(out.read_text())
    # Four trainers send one copy each in the relay, and eight without it.
    assert figures["simulated"]["wire_s"] > 7.5 * figures["relayed_wire_s"]


def test_a_policy_flag_changes_the_modes(small: Path, tmp_path: Path) -> None:
    packed = []
    for run_bytes in ("1", "1000000000"):
        out = tmp_path / f"{run_bytes}.json"
        plan_command.run(
            arguments(str(small), "--direct-min-run-bytes", run_bytes, "--json", str(out))
        )
        packed.append(json.loads(out.read_text())["num_ops"]["packed"])
    assert packed[0] == 0
    assert packed[1] > 0


def test_files_that_cannot_be_read_or_written_are_named(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml"):
        plan_command.run(arguments(str(tmp_path / "absent.toml")))
    with pytest.raises(ConfigError, match="--json: cannot write"):
        plan_command.run(arguments(str(small), "--json", str(tmp_path / "no" / "dir.json")))


def test_each_resource_can_be_the_bottleneck(small: Path) -> None:
    topology = parse_topology(small.read_text())
    planned = plan_with_reports(trainer_manifests(topology), engine_manifests(topology))
    fast = Fabric(nic_gbytes_per_s=1e6, per_write_s=1e-12, pack_gbytes_per_s=1e6)
    for slow, words in (
        (structs.replace(fast, nic_gbytes_per_s=1e-3), "gress of"),
        (structs.replace(fast, per_write_s=1.0), "write issue rate of trainer/"),
        (structs.replace(fast, pack_gbytes_per_s=1e-6), "pack at trainer/"),
    ):
        cost = predict(planned.plan, slow, planned.routing)
        assert words in cost.bottleneck
        assert cost.wire_s == max(cost.egress_s, cost.ingress_s, cost.issue_s, cost.pack_s)
        assert cost.lower_bound_s <= cost.wire_s


def test_local_bytes_take_the_local_link(small: Path) -> None:
    topology = parse_topology(small.read_text())
    planned = plan_with_reports(trainer_manifests(topology), engine_manifests(topology))
    apart = predict(planned.plan, Fabric(nic_gbytes_per_s=10.0), planned.routing)
    together = predict(
        planned.plan,
        Fabric(nic_gbytes_per_s=10.0, local_gbytes_per_s=100.0, colocated=True),
        planned.routing,
    )
    assert together.wire_s == pytest.approx(apart.wire_s / 10)
    assert together.lower_bound_s <= together.wire_s


def test_link_figures_add_up(small: Path) -> None:
    topology = parse_topology(small.read_text())
    plan = plan_with_reports(trainer_manifests(topology), engine_manifests(topology)).plan
    links = summarize_links(plan)
    assert links.num_links == 16
    assert links.min_nbytes <= links.median_nbytes <= links.max_nbytes == links.heaviest[0][2]
    assert summarize_links(plan.parts(sending=True, all_names=True)["trainer/0"]).num_links == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--links-at-once", "0", "--simulate"], "--links-at-once must be >= 1, got 0"),
        (["--links-at-once", "3"], "must go with --simulate"),
        (["--relay", "tree"], "must go with --simulate"),
    ],
)
def test_an_option_without_effect_is_refused(small: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_command.run(arguments(str(small), *words))
