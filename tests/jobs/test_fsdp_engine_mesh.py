"""`FsdpEngine` on meshes of four real gloo ranks, compared with the same steps of plain PyTorch in one process."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from mesh_rank import (
    LENGTH,
    Decoder,
    batch,
    groups_of,
    mean_loss,
    module_of,
    optimizer,
    schedule,
)

from windlass.backends.collective_group import Rendezvous
from windlass.errors import ConfigError
from windlass.jobs.fsdp_engine import FsdpEngine, LossMean, ParallelSizes, Samples, micro_batches
from windlass.jobs.train_worker import TrainContext

RANKS = str(Path(__file__).parents[1] / "support" / "mesh_rank.py")
DEADLINE_S = 300.0
NORM = 0.5
"""Limit of the gradient norm. The norm of every step is larger."""

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)

WAYS: list[dict[str, Any]] = [
    {"name": "fsdp", "groups": 4},
    {"name": "hsdp", "groups": 4, "sizes": {"dp_replicate": 2}},
    {"name": "tp", "groups": 4, "sizes": {"tp": 2}},
    {"name": "hsdp_tp", "groups": 4, "sizes": {"dp_replicate": 2, "tp": 2}},
    {"name": "cp", "groups": 4, "sizes": {"cp": 2}},
    # Two data-parallel ranks have two groups, and two ranks have one. The latter also run a group with share 0.
    {"name": "micro", "groups": 6, "sizes": {"dp_replicate": 2}, "num_groups": 1},
    # Two ranks have three groups in micro-batches of one and two groups. The others have micro-batches of one group.
    {"name": "uneven", "groups": 10, "num_groups": 2},
    # Two ranks have two groups, and two have one. The step must equal a single rank's step on all groups.
    {"name": "shares", "groups": 6},
    {"name": "bfloat16", "groups": 4, "bfloat16": True},
    {"name": "before", "groups": 4, "sizes": {"tp": 2}, "schedule": True, "save": "at", "steps": [0]},
    {"name": "after", "groups": 4, "schedule": True, "load": "at", "steps": [1, 2, 3]},
    # Each rank, or each micro-batch, uses another expert.
    {"name": "sparse", "groups": 4, "sparse": True, "save": "sparse"},
    {"name": "sparse_micro", "groups": 8, "sparse": True, "sizes": {"dp_replicate": 2}, "num_groups": 1},
    {"name": "nan", "groups": 4, "nan": True, "max_grad_norm": 0.0, "steps": [0]},
    {"name": "sparse_after", "groups": 4, "sparse": True, "load": "sparse", "steps": [3]},
]  # fmt: skip
for way in WAYS:
    way |= {"max_grad_norm": NORM, "steps": [0, 1, 2]} | way


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Provide the results of the four ranks for each way."""
    folder = tmp_path_factory.mktemp("ranks")
    stores = [Rendezvous("127.0.0.1", DEADLINE_S) for _ in WAYS]
    what = json.dumps([WAYS, [store.port for store in stores]])
    with subprocess.Popen(
        (sys.executable, RANKS, str(folder), what), start_new_session=True
    ) as ranks:
        try:
            assert ranks.wait(timeout=DEADLINE_S) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
    return {
        way["name"]: [torch.load(folder / f"{way['name']}-{rank}.pt") for rank in range(4)]
        for way in WAYS
    }


def trained(
    way: dict[str, Any], size: int, steps: list[int]
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train in one process on the mean over all samples, with gradients added over the shares of data-parallel ranks."""
    torch.manual_seed(7)
    model = module_of(way)
    stepper = optimizer(model)
    rates = schedule(stepper)
    metrics = []
    for step in steps:
        groups = groups_of(way, step)
        whole: dict[str, torch.Tensor] = {}
        last = 0.0
        for index in range(size):
            # FSDP2 computes with bfloat16 parameters and reduces gradients in float32.
            replica = copy.deepcopy(model).bfloat16() if way.get("bfloat16") else model
            replica.zero_grad()
            loss = mean_loss(replica, groups[index::size])
            loss = loss * len(groups[index::size]) / len(groups)
            loss.backward()  # type: ignore[no-untyped-call]
            last += float(loss.detach())
            for name, parameter in replica.named_parameters():
                assert parameter.grad is not None or way.get("sparse")
                if parameter.grad is not None:
                    whole[name] = whole.get(name, 0) + parameter.grad.float()
        for name, parameter in model.named_parameters():
            parameter.grad = whole[name].clone() if name in whole else None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        assert norm > NORM
        metrics.append({"loss": last, "grad_norm": float(norm)})
        metrics[-1]["lr"] = stepper.param_groups[0]["lr"]
        stepper.step()
        if way.get("schedule"):
            rates.step()
    return {name: p.detach() for name, p in model.named_parameters()}, metrics


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert {*ours} == {*theirs}
    return max(float((ours[name] - theirs[name]).detach().abs().max()) for name in theirs)


@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("fsdp", (0, 1, 2, 3)),
        ("hsdp", (0, 1, 2, 3)),
        ("tp", (0, 0, 1, 1)),
        ("hsdp_tp", (0, 0, 1, 1)),
        ("cp", (0, 0, 1, 1)),
        ("micro", (0, 1, 2, 3)),
        ("uneven", (0, 1, 2, 3)),
        ("shares", (0, 1, 2, 3)),
        ("bfloat16", (0, 1, 2, 3)),
        ("after", (0, 1, 2, 3)),
        ("sparse", (0, 1, 2, 3)),
        ("sparse_micro", (0, 1, 2, 3)),
    ],
)
def test_three_steps_on_a_mesh_equal_three_steps_in_one_process(
    found: dict[str, list[dict[str, Any]]], name: str, indices: tuple[int, ...]
) -> None:
    (way,) = (way for way in WAYS if way["name"] == name)
    ranks, size = found[name], max(indices) + 1
    assert tuple(rank["data_parallel"] for rank in ranks) == tuple((i, size) for i in indices)
    steps = way["steps"]
    weights, metrics = trained(way, size, steps)
    # The way "after" continues from the first step of another mesh with other data-parallel ranks.
    if name == "after":
        metrics = check_resumed(found, way)
    else:
        ours = ranks[0]["weights"]
        began, _ = trained(way, size, [])
        assert distance(ours, began) > 0.05
        assert distance(ours, weights) < (2e-3 if name == "bfloat16" else 2e-6)
        if name == "bfloat16":
            assert {each.dtype for each in ours.values()} == {torch.float32}
            whole, _ = trained({**way, "bfloat16": False}, size, steps)
            assert distance(ours, whole) > 4 * distance(ours, weights)
    for rank in ranks:
        assert distance(rank["weights"], ranks[0]["weights"]) == 0
        for mine, expected in zip(rank["metrics"], metrics, strict=True):
            assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
            assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-2)


def test_gradients_that_are_not_clipped_have_a_norm_too(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """A job neither publishes nor saves a step with a metric that is not finite."""
    for rank in found["nan"]:
        (metrics,) = rank["metrics"]
        assert metrics["loss"] == 0
        assert math.isnan(metrics["grad_norm"])


def test_parameters_without_a_gradient_have_no_place_in_a_checkpoint(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    (way,) = (way for way in WAYS if way["name"] == "sparse_after")
    weights, _ = trained(way, 4, [0, 1, 2, 3])
    initial, _ = trained(way, 4, [])
    ours = found["sparse_after"][0]["weights"]
    assert distance(ours, weights) < 2e-6
    for name in ("unused.weight", "tower.weight"):
        assert torch.equal(ours[name], initial[name])


def check_resumed(
    found: dict[str, list[dict[str, Any]]], way: dict[str, Any]
) -> list[dict[str, float]]:
    """Check that training after a load continues with the saved momentum and learning rate.

    All ranks have the same number of samples here, so the number of ranks makes no difference.
    """
    weights, metrics = trained(way, 4, [0, 1, 2, 3])
    assert distance(found["after"][0]["weights"], weights) < 2e-6
    assert [each["lr"] for each in metrics] == [0.5, 0.5, 0.125, 0.125]
    assert [each["lr"] for each in found["before"][0]["metrics"]] == [0.5]
    assert [each["lr"] for each in found["after"][0]["metrics"]] == [0.5, 0.125, 0.125]
    return metrics[1:]


def one_rank(rate: float, decay: float) -> tuple[FsdpEngine, torch.optim.Optimizer]:
    """Return the engine of a job with one rank, and its optimizer. The schedule warms up over three steps, then decays."""
    made: list[torch.optim.Optimizer] = []

    def build(model: torch.nn.Module) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay))
        return made[0]

    def warmed(stepper: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        schedules = torch.optim.lr_scheduler
        warm = schedules.LambdaLR(stepper, lambda step: min(1.0, (step + 1) / 4))
        decaying = schedules.ExponentialLR(stepper, 0.5)
        return schedules.SequentialLR(stepper, [warm, decaying], [3])

    engine = FsdpEngine(
        model=Decoder, optimizer=build, loss=mean_loss, lr_schedule=warmed, publish_to_fleet=False
    )
    store = Rendezvous("127.0.0.1", DEADLINE_S)
    engine.setup(TrainContext(0, 1, "127.0.0.1", store.port, "", "", DEADLINE_S))
    return engine, made[0]


def test_new_settings_of_the_optimizer_hold_after_a_load(tmp_path: Path) -> None:
    engine, _ = one_rank(0.01, 0.1)
    try:
        rates = [engine.train_step(0, batch(0, 1))["lr"]]
        engine.save(str(tmp_path))
        rates += [engine.train_step(step, batch(step, 1))["lr"] for step in range(1, 6)]
    finally:
        engine.close()
    for rate, decay in ((0.01, 0.1), (0.002, 0.0)):
        engine, stepper = one_rank(rate, decay)
        try:
            engine.load(str(tmp_path))
            found = [engine.train_step(step, batch(step, 1))["lr"] for step in range(1, 6)]
        finally:
            engine.close()
        assert found == pytest.approx([each * rate / 0.01 for each in rates[1:]])
        assert stepper.param_groups[0]["weight_decay"] == decay


def test_sizes_that_fit_no_mesh_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"ParallelSizes: cp must be >= 1, got 0"):
        ParallelSizes(cp=0)
    with pytest.raises(
        ConfigError, match=r"dp_replicate \* cp \* tp must divide the 4 ranks, got 1 \* 1 \* 3"
    ):
        ParallelSizes(tp=3).axes(4)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel must be given if and only if sizes\.tp > 1"
    ):
        FsdpEngine(model=Decoder, optimizer=optimizer, loss=mean_loss, sizes=ParallelSizes(tp=2))
    with pytest.raises(ConfigError, match=r"num_groups must be >= 0, got -1"):
        FsdpEngine(model=Decoder, optimizer=optimizer, loss=mean_loss, num_groups=-1)


def test_losses_are_weighted_by_samples_or_by_tokens() -> None:
    groups = batch(0, 3)
    assert LossMean.SAMPLES.weight(groups) == 6
    assert LossMean.TOKENS.weight(groups) == 6 * LENGTH
    store = Rendezvous("127.0.0.1", DEADLINE_S)
    dist.init_process_group("gloo", store=store.store, rank=0, world_size=1)
    try:
        long, short = groups[0], [msgspec.structs.replace(groups[1][0], **SHORT)]
        for kind, expected in (
            (LossMean.SAMPLES, [2 / 3, 1 / 3]),
            (LossMean.TOKENS, [16 / 17, 1 / 17]),
        ):
            pieces = micro_batches([long, short], 1, kind, torch.device("cpu"))
            assert [weight for _, weight in pieces] == pytest.approx(expected)
        untrained = [msgspec.structs.replace(short[0], loss_mask=(0,))]
        for kind, lacking, unit in (
            (LossMean.SAMPLES, [], "sample"),
            (LossMean.TOKENS, [untrained], "trained token"),
        ):
            with pytest.raises(ConfigError, match=f"must have at least one {unit}, got none on"):
                micro_batches(lacking, 1, kind, torch.device("cpu"))
        wrong_cuts: list[tuple[LossMean, Callable[[Samples], list[Samples]], str]] = [
            (LossMean.SAMPLES, lambda _: [], "every sample once, got 0 of 3 samples on rank 0"),
            (
                LossMean.SAMPLES,
                lambda _: [[long], []],
                "every sample once, got 2 of 3 samples on rank 0",
            ),
            (
                LossMean.TOKENS,
                lambda _: [[long], [long], [short]],
                f"every trained token once, got {4 * LENGTH + 1} of {2 * LENGTH + 1} trained tokens on rank 0",
            ),
        ]
        for kind, cut, text in wrong_cuts:
            with pytest.raises(ConfigError, match=f"cut must return {text}"):
                micro_batches([long, short], 0, kind, torch.device("cpu"), cut=cut)
        whole = micro_batches(
            [long, short], 0, LossMean.SAMPLES, torch.device("cpu"), cut=lambda _: [[short], [long]]
        )
        assert whole == [([short], 1 / 3), ([long], 2 / 3)]
    finally:
        dist.destroy_process_group()


SHORT = {"loss_mask": (), "output_ids": (3,), "logprobs": (-1.0,), "versions": (0,)}
