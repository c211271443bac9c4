"""Each engine has one table of rules, for its command line and for the settings of a running engine."""

from __future__ import annotations

import pytest

from windlass.engines.options import Rule, refuse_options, refuse_settings
from windlass.engines.spec import ENGINES, EngineOptions
from windlass.errors import ConfigError

RULES = (
    Rule("--nodes", (1,), "ranks are on one host", ("cluster.nodes",), aliases=("-n",)),
    Rule("--mode", (None, "none"), "it moves", ("mode",)),
    Rule("--moves", (False,), "weights move", ("moves",)),
)


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "1"],
        ["--nodes=1", "--other"],
        ["-n", "1"],
        ["--mode", "none"],
        ["--other", "--nodes_per_rack", "7"],
    ],
)
def test_a_value_that_updates_survive_may_be_given(words: list[str]) -> None:
    refuse_options(words, RULES)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "2"], "--nodes must be 1, got '2': ranks are on one host"),
        (["-n=2"], "-n must be 1, got '2'"),
        (["--mode", "fast"], "--mode must be none, got 'fast': it moves"),
        (["--moves"], "--moves must not be given: weights move"),
        (["--moves", "False"], "--moves must not be given"),
    ],
)
def test_a_value_that_updates_do_not_survive_is_refused_with_the_reason(
    words: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse_options(words, RULES)


def test_refusal_rules_apply_to_an_engines_settings() -> None:
    settings: dict[str, object] = {"cluster.nodes": 1, "mode": None}
    # This release has no setting `moves`.
    refuse_settings("engine", RULES, settings.__getitem__)
    with pytest.raises(ConfigError, match=r"engine: cluster\.nodes must be 1, got 2: ranks are on"):
        refuse_settings("engine", RULES, {**settings, "cluster.nodes": 2}.__getitem__)
    with pytest.raises(ConfigError, match="engine: moves must be False, got True: weights move"):
        refuse_settings("engine", RULES, {**settings, "moves": True}.__getitem__)


def test_a_rule_may_depend_on_the_transport() -> None:
    sleeps = (Rule("--sleeps", (False,), "use pull", ("sleeps",), transports=("pull",)),)
    refuse_options(["--sleeps"], sleeps, "pull")
    refuse_settings("engine", sleeps, {"sleeps": True}.__getitem__, "pull")
    for transport in ("", "auto"):
        with pytest.raises(ConfigError, match="--sleeps must not be given: use pull"):
            refuse_options(["--sleeps"], sleeps, transport)
        with pytest.raises(ConfigError, match="sleeps must be False, got True: use pull"):
            refuse_settings("engine", sleeps, {"sleeps": True}.__getitem__, transport)


@pytest.mark.parametrize("name", ENGINES.names())
def test_an_engine_plugin_gives_its_command_and_may_require_a_port(name: str) -> None:
    engine = ENGINES.find(name)
    options = EngineOptions(name="a", model="/m", controller="http://c", port=9, python="/p")
    words = engine.command(options)
    assert words[:5] == ("/p", "-m", f"windlass.engines.{name}", "--name", "a")
    assert words[-4:] == ("--controller", "http://c", "--port", "9")
    nowhere = EngineOptions(name="a", model="/m")
    if engine.needs_port:
        with pytest.raises(ConfigError, match=f"port must be > 0 for {name}, got 0"):
            engine.command(nowhere)
    else:
        assert "--port" not in engine.command(nowhere)
