"""Seeds: each sample of a group, each repetition and each call of a workflow has its own seed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from fake_engine import FakeEngine

from windlass.errors import ConfigError
from windlass.rollout import (
    Reject,
    RolloutConfig,
    RolloutController,
    SamplingParams,
    StalenessPolicy,
    StaticEngines,
    WorkflowContext,
)

SEEDED = SamplingParams(max_new_tokens=2, sampling_seed=10)


class Recording(FakeEngine):
    """Engine that records the seeds of its requests."""

    def __init__(self) -> None:
        super().__init__("e")
        self.seeds: list[int | None] = []

    async def _generate(self, http_request: web.Request) -> web.StreamResponse:
        body = json.loads(await http_request.read())
        self.seeds.append(body["sampling_params"].get("sampling_seed"))
        return await super()._generate(http_request)


@pytest.fixture
async def engine() -> AsyncIterator[Recording]:
    async with Recording() as engine:
        yield engine


async def started(
    stack: AsyncExitStack, engine: Recording, journal: Path | None = None
) -> RolloutController:
    config = RolloutConfig(journal=journal, max_rejections=9)
    policy = StalenessPolicy.unbounded(100)
    engines = StaticEngines([engine.entry])
    return await stack.enter_async_context(RolloutController(engines, policy, config=config))


async def rejects_once(context: WorkflowContext) -> int:
    """Reject the first attempt; then return the seed of the context."""
    await context.generate((1, 2))
    if context.attempt == 1:
        raise Reject("again")
    return context.sampling.sampling_seed or 0


async def two_calls(context: WorkflowContext) -> object:
    await context.generate((1, 2))
    await context.generate((1, 2), SEEDED)
    return None


async def test_samples_of_a_group_and_repetitions_have_seeds_of_their_own(
    engine: Recording,
) -> None:
    async with AsyncExitStack() as stack:
        rollouts = await started(stack, engine)
        rollouts.run_here({"rejects": rejects_once, "calls": two_calls})
        rollouts.submit_group((1, 2), 3, SEEDED)
        await rollouts.next_batch(1, deadline_s=30)
        assert sorted(seed or 0 for seed in engine.seeds) == [10, 11, 12]
        engine.seeds.clear()
        rollouts.submit_workflow_group("rejects", None, 2, SEEDED)
        (group,) = await rollouts.next_batch(1, deadline_s=30)
        assert [rollout.value for rollout in group.rollouts] == [12, 13]
        assert sorted(seed or 0 for seed in engine.seeds) == [10, 11, 12, 13]
        engine.seeds.clear()
        await rollouts.submit_workflow("calls", None, SEEDED)
        assert engine.seeds == [10, 1_000_013]
        engine.seeds.clear()
        await rollouts.submit((1, 2), SamplingParams(max_new_tokens=1))
        assert engine.seeds == [None]


async def test_a_restarted_controller_uses_the_same_seeds(
    engine: Recording, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        first = await started(stack, engine, tmp_path / "journal")
        given = msgspec.structs.replace(SEEDED, logit_bias={7: 1.5}, choice=("a", "b"))
        first.submit_group((1, 2), 3, given)
    async with AsyncExitStack() as stack:
        again = await started(stack, engine, tmp_path / "journal")
        again.run_here({})
        await again.next_batch(1, deadline_s=30)
    assert sorted(seed or 0 for seed in engine.seeds) == [10, 11, 12]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"sampling_seed": -1},
            r"sampling_seed must be an integer in \[0, 2147483648\), or None, got -1",
        ),
        ({"sampling_seed": 1 << 31}, r"sampling_seed must be an integer in"),
        ({"sampling_seed": True}, r"sampling_seed must be an integer in .*, got True"),
        ({"frequency_penalty": 2.5}, r"frequency_penalty must be in \[-2, 2\], got 2\.5"),
        ({"presence_penalty": "1"}, r"presence_penalty must be a Python int or float, got '1'"),
        (
            {"logit_bias": {7: 101}},
            r"logit_bias must be a mapping from token ids to numbers in \[-100, 100\]",
        ),
        ({"logit_bias": {"7": 1.0}}, r"logit_bias must be a mapping from token ids to numbers"),
        ({"priority": 1.5}, r"priority must be an integer, got 1\.5"),
        ({"choice": ("a", "")}, r"choice must be a tuple of texts, none of them empty"),
        ({"choice": ("a",), "regex": "a"}, r"choice must be empty if regex is set, got \('a',\)"),
        ({"ebnf": "a", "json_schema": "{}"}, r"ebnf must be empty if json_schema is set, got 'a'"),
    ],
)
def test_sampling_parameters_outside_their_rules_are_refused(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        SamplingParams(max_new_tokens=1, **given)


def test_an_unknown_sampling_parameter_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="n"):
        SamplingParams(max_new_tokens=1, n=4)  # type: ignore[call-arg]
