"""The Grafana dashboard and alert rules of `deploy/` against a real controller and Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from kept_port import free_port
from prometheus_client.parser import text_string_to_metric_families
from small_pair import connect_small_pair
from trained import sample

import windlass
from windlass.control.report import RoundOutcome
from windlass.testing.resting_engine import RestingEngine

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/windlass.json").read_text())
INSTALLED = ROOT / "build/prometheus/usr/bin"
PROMETHEUS, PROMTOOL = (
    shutil.which(name, path=f"{INSTALLED}:/usr/bin:/usr/local/bin") or ""
    for name in ("prometheus", "promtool")
)
TOKEN = "a token of the tests"
needs_prometheus = pytest.mark.skipif(
    not (PROMETHEUS and PROMTOOL),
    reason="no prometheus: tools/install_prometheus.sh build/prometheus",
)


def expressions() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the place of each expression, the expression, and the labels in its legend."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            yield panel["title"], target["expr"], labels
    for each in DASHBOARD["annotations"]["list"]:
        yield each["name"], each["expr"], []


def as_grafana_asks(expression: str) -> str:
    """Replace Grafana's variables in an expression."""
    for name, value in {"$job": ".+", "$__rate_interval": "15s", "$__interval": "15s"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_the_dashboard_is_valid_for_grafana() -> None:
    """Panels do not overlap, and all variables and data sources exist."""
    known = {each["name"] for each in DASHBOARD["templating"]["list"]}
    known |= {"__rate_interval", "__interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) <= known
    assert DASHBOARD["schemaVersion"] >= 36, "data sources are objects since version 36"
    assert DASHBOARD["uid"]
    panels, taken = DASHBOARD["panels"], set[tuple[int, int]]()
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        at, source = panel["gridPos"], panel["datasource"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in {"stat", "timeseries"}
        assert source == {"type": "prometheus", "uid": "${datasource}"}
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets), panel["title"]


async def metrics_of(controller: windlass.Controller) -> str:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
        http.get(f"{controller.url}/metrics") as answer,
    ):
        return await answer.text()


async def test_every_metric_and_label_of_the_dashboard_and_rules_exists() -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        text = await metrics_of(controller)
    series = [s for family in text_string_to_metric_families(text) for s in family.samples]
    # Series of engines exist only once there is an engine.
    names = {s.name for s in series} | {"windlass_engine_version"}
    values = {value for s in series for value in s.labels.values()}
    named = 0
    rules = ALERTS.read_text()
    for where, expression, _ in [*expressions(), ("alerts", rules, [])]:
        for name in re.findall(r"\bwindlass_\w+", expression):
            assert name in names, f"{where}: {name}"
            named += 1
        for wanted in re.findall(r'(?:state|outcome)[!=]?[=~]"([^"]+)"', expression):
            assert set(wanted.split("|")) <= values, f"{where}: {wanted}"
    assert named > 40
    assert {"published", "aborted", "failed"} <= values


@needs_prometheus
def test_promtool_accepts_the_rules_and_every_alert_fires(tmp_path: Path) -> None:
    tests = tmp_path / "alerts_test.yml"
    given = (Path(__file__).parent / "alerts_test.yml").read_text()
    made_to_fire = re.findall(r'alertname: (\w+)\n +exp_alerts:|\{alertname="(\w+)"\}', given)
    assert {a or b for a, b in made_to_fire} == set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
    tests.write_text(given.replace("ALERTS]", f"{ALERTS}]"))
    scrape = ROOT / "deploy/prometheus/scrape.yml"
    for command in (
        ("check", "rules", str(ALERTS)),
        ("check", "config", "--syntax-only", str(scrape)),
        ("test", "rules", str(tests)),
    ):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
async def test_a_real_prometheus_scrapes_a_controller_and_answers_every_panel(
    tmp_path: Path,
) -> None:
    """After real updates and trained samples all queries have answers, and the rules are loaded."""
    (tmp_path / "token").write_text(TOKEN)
    async with windlass.Controller(token=TOKEN) as controller, asyncio.timeout(90):
        scrape = (ROOT / "deploy/prometheus/scrape.yml").read_text()
        for old, new in {
            "/etc/prometheus/windlass-token": str(tmp_path / "token"),
            "controller.example:8300": controller.url.removeprefix("http://"),
            "scrape_interval: 10s": "scrape_interval: 1s",
        }.items():
            assert old in scrape
            scrape = scrape.replace(old, new)
        config = tmp_path / "prometheus.yml"
        config.write_text(f"rule_files: [{ALERTS}]\n{scrape}")
        nowhere = "http://127.0.0.1:9"
        pair = await asyncio.to_thread(
            connect_small_pair, controller.url, TOKEN, RestingEngine(), nowhere
        )
        try:
            async with (
                prometheus(config, tmp_path / "data") as url,
                aiohttp.ClientSession() as http,
            ):
                for version in range(16):
                    done = await asyncio.to_thread(pair.trainer.publish, version, deadline_s=30)
                    assert done.result().outcome is RoundOutcome.PUBLISHED
                    controller.observe_samples([sample(version - 1)] * 4)
                    await asyncio.sleep(0.5)
                for title, expression, labels in expressions():
                    query = {"query": as_grafana_asks(expression)}
                    async with http.get(f"{url}/api/v1/query", params=query) as answer:
                        found = await answer.json()
                    assert found["status"] == "success", (title, found)
                    assert found["data"]["result"], (title, expression)
                    for answered in found["data"]["result"]:
                        assert {*labels} <= {*answered["metric"]}, (title, expression)
                async with http.get(f"{url}/api/v1/rules") as answer:
                    (group,) = (await answer.json())["data"]["groups"]
                assert len(group["rules"]) == ALERTS.read_text().count("- alert:") > 5
        finally:
            await asyncio.to_thread(pair.close)


@asynccontextmanager
async def prometheus(config: Path, data: Path) -> AsyncIterator[str]:
    """Yield the address of a Prometheus that runs during the block."""
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={data}"),
        f"--web.listen-address={address}",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        said = b""
        while b"ready to receive web requests" not in said:
            said = await process.stderr.readline()
            assert said, "prometheus ended before it listened"
        draining = asyncio.create_task(process.stderr.read())
        yield f"http://{address}"
        draining.cancel()
    finally:
        process.kill()
        await process.wait()
