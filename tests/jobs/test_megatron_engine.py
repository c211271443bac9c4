"""`MegatronEngine` on real Megatron-core ranks over gloo makes the same steps as transformers, and engines serve its weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers
from child_process import running
from hf_settings import DENSE, SMALL_LATENT, SPARSE, transformers_config
from needs import need_package

import windlass
from windlass.jobs.schedulers.local import LocalScheduler
from windlass.jobs.train_controller import TrainController
from windlass.rollout.messages import TrainingSample

need_package("megatron")

TOKEN = "secret of the test"
RANK = str(Path(__file__).parents[1] / "support" / "megatron_engine_rank.py")
DEADLINE_S = 120.0
NUM_TOKENS, LR, NORM = 8, 0.02, 0.5


def sample(number: int) -> TrainingSample:
    ids = [(number * 7 + place * (3 + number % 5)) % 60 for place in range(NUM_TOKENS)]
    return TrainingSample(
        prompt_ids=tuple(ids[:3]),
        output_ids=tuple(ids[3:]),
        logprobs=(-0.5,) * (NUM_TOKENS - 3),
        versions=(0,) * (NUM_TOKENS - 3),
        reward=1.0,
        group_id=number,
        engine="e",
    )


def groups_of(step: int) -> list[list[TrainingSample]]:
    """Return two groups of two samples for each of two data-parallel ranks."""
    return [[sample(step * 8 + group * 2 + n) for n in range(2)] for group in range(4)]


class Alone:
    """The same training with transformers and torch's AdamW in the test process."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        torch.manual_seed(3)
        settings = transformers_config(config)
        self.model = transformers.AutoModelForCausalLM.from_config(settings)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
            for name, buffer in self.model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
        self.model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)

    def step(self, step: int, lr: float) -> tuple[float, float]:
        """Make a step, and return the loss and the norm of the unclipped gradients."""
        found = self.gradient(groups_of(step))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return found

    def gradient(self, groups: list[list[TrainingSample]]) -> tuple[float, float]:
        """Compute clipped gradients, and return the loss and the norm of the unclipped gradients."""
        samples = [each for group in groups for each in group]
        ids = torch.tensor([each.prompt_ids + each.output_ids for each in samples])
        self._optimizer.zero_grad()
        loss = self.model(ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        return float(loss.detach()), float(norm)


@pytest.mark.parametrize(
    ("config", "layout", "is_restarted"),
    [
        (SPARSE, {"ep": 2, "distributed": True}, False),
        *(
            pytest.param(config, layout, True, marks=pytest.mark.long)
            for config, layout in (
                (DENSE, {"tp": 2, "distributed": True}),
                (DENSE, {"pp": 2}),
                ({**DENSE, "num_hidden_layers": 4}, {"pp": 2, "vpp": 2}),
            )
        ),
    ],
    ids=["ep2_distributed_optimizer", "tp2_distributed_optimizer", "pp2", "pp2_virtual2"],
)
async def test_steps_and_served_weights_equal_those_of_transformers(
    tmp_path: Path, config: Mapping[str, Any], layout: dict[str, Any], is_restarted: bool
) -> None:
    alone = Alone(config, tmp_path)
    (tmp_path / "sequence.json").write_text(json.dumps([0] * NUM_TOKENS))
    world_size = 2 * layout.get("tp", 1) * layout.get("pp", 1)
    controller = windlass.Controller(token=TOKEN)
    async with LocalScheduler(tmp_path / "logs") as scheduler:
        trainers = TrainController(
            scheduler,
            command=(sys.executable, RANK, str(tmp_path), json.dumps(layout)),
            world_size=world_size,
            token=TOKEN,
            coordinator=controller.coordinator,
        )
        trainers.mount(controller.server)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with ExitStack() as stack:
            async with controller, aiohttp.ClientSession(headers=headers) as http:
                engine = stack.enter_context(
                    running(
                        *("-m", "windlass.engines.embedded", "--name", "one", "--tp", "1"),
                        *("--model", str(tmp_path / "config.json"), "--dtype", "float32"),
                        *("--controller", controller.url, "--seed", "5"),
                        token=TOKEN,
                    )
                )
                await trainers.start(controller.url, deadline_s=DEADLINE_S)
                await check_steps(trainers, alone, tmp_path, controller.url if is_restarted else "")
                await trainers.publish(1, deadline_s=DEADLINE_S)
                assert engine.stdout is not None
                url = json.loads(await asyncio.to_thread(engine.stdout.readline))["url"]
                for name, expected in alone.model.state_dict().items():
                    async with http.get(f"{url}/get_weights_by_name?name={name}") as response:
                        served = torch.tensor((await response.json())["parameter"])
                    assert torch.allclose(served, expected, atol=2e-4), name
                await trainers.close(grace_s=5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (SPARSE, {"ep": 2, "distributed": True}),
        (DENSE, {"tp": 2, "distributed": True}),
        (DENSE, {"pp": 2}),
    ],
    ids=["ep2_distributed_optimizer", "tp2_distributed_optimizer", "pp2"],
)
async def test_steps_over_nccl_equal_those_of_transformers(
    tmp_path: Path, config: Mapping[str, Any], layout: dict[str, Any]
) -> None:
    alone = Alone(config, tmp_path)
    async with two_ranks(tmp_path, layout | {"device": "cuda"}, num_gpus=1) as (trainers, _):
        await check_steps(trainers, alone, tmp_path, "")


@contextlib.asynccontextmanager
async def two_ranks(
    folder: Path, layout: Mapping[str, Any], *, num_gpus: int = 0
) -> AsyncIterator[tuple[TrainController, str]]:
    """Start two ranks. Yield their controller, and the address at which they can be started again."""
    (folder / "sequence.json").write_text(json.dumps([0] * NUM_TOKENS))
    controller = windlass.Controller(token=TOKEN)
    async with LocalScheduler(folder / "logs") as scheduler:
        trainers = TrainController(
            scheduler,
            command=(sys.executable, RANK, str(folder), json.dumps(layout)),
            world_size=2,
            num_gpus=num_gpus,
            token=TOKEN,
        )
        trainers.mount(controller.server)
        async with controller:
            await trainers.start(controller.url, deadline_s=DEADLINE_S)
            yield trainers, controller.url
            await trainers.close(grace_s=5)


async def test_checkpoint_has_the_parameters_that_other_ranks_have_updated(tmp_path: Path) -> None:
    """With `overlap_param_gather`, a rank gets the parameters of other ranks only in the next forward pass."""
    Alone(DENSE, tmp_path)
    layout = {"distributed": True, "overlaps": True, "bf16": True}
    async with two_ranks(tmp_path, layout) as (trainers, url):
        await trainers.train_step(0, groups_of(0), deadline_s=DEADLINE_S)
        await trainers.save(str(tmp_path / "saved"), deadline_s=DEADLINE_S)
        expected = await trainers.train_step(1, groups_of(1), deadline_s=DEADLINE_S)
        await trainers.start(url, deadline_s=DEADLINE_S)
        await trainers.load(str(tmp_path / "saved"), deadline_s=DEADLINE_S)
        found = await trainers.train_step(1, groups_of(1), deadline_s=DEADLINE_S)
        assert found.ranks == expected.ranks


async def test_biases_of_routers_stay_in_float32(tmp_path: Path) -> None:
    """Megatron's wrapper for bfloat16 rounds these biases, and the first forward pass converts them back."""
    alone = Alone({**DENSE, **SMALL_LATENT, "vocab_size": 64}, tmp_path)
    expected = alone.model.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    async with two_ranks(tmp_path, {"distributed": True, "bf16": True}) as (trainers, _):
        places = []
        for step in range(2):
            found = await trainers.call("biases", None, deadline_s=DEADLINE_S)
            for biases in found:
                assert biases["values"].dtype is torch.float32
                assert step or torch.equal(biases["values"], expected)
            places.append([biases["addresses"] for biases in found])
            await trainers.train_step(step, groups_of(step), deadline_s=DEADLINE_S)
        # The addresses that a rank described when it connected must stay valid.
        assert places[0] == places[1]


@pytest.mark.parametrize(
    "layout",
    [
        {"optimizer": "sgd"},
        {"frozen": "layers.0."},
        {"pp": 2, "frozen": "first stage"},
        {"pp": 2, "frozen": "first stage", "distributed": True},
    ],
    ids=["sgd", "frozen_layer", "frozen_stage", "frozen_stage_distributed_optimizer"],
)
async def test_training_continues_from_a_checkpoint(
    tmp_path: Path, layout: Mapping[str, Any]
) -> None:
    """Megatron has no function that creates SGD's states, and would stack layers with and without states of the optimizer."""
    Alone(DENSE, tmp_path)
    async with two_ranks(tmp_path, layout) as (trainers, url):
        await trainers.train_step(0, groups_of(0), deadline_s=DEADLINE_S)
        await trainers.save(str(tmp_path / "saved"), deadline_s=DEADLINE_S)
        expected = [
            (await trainers.train_step(step, groups_of(step), deadline_s=DEADLINE_S)).ranks
            for step in (1, 2)
        ]
        await trainers.start(url, deadline_s=DEADLINE_S)
        await trainers.load(str(tmp_path / "saved"), deadline_s=DEADLINE_S)
        # The loss of step 2 depends on the momentum of step 0.
        for step in (1, 2):
            found = await trainers.train_step(step, groups_of(step), deadline_s=DEADLINE_S)
            assert found.ranks == expected[step - 1]


@pytest.mark.parametrize("layout", [{}, {"distributed": True}], ids=["plain", "distributed"])
async def test_a_checkpoint_from_before_the_first_step_changes_no_later_step(
    tmp_path: Path, layout: Mapping[str, Any]
) -> None:
    """Regression: a distributed optimizer could not be saved, and the checkpoint of another one could not be loaded."""
    Alone(DENSE, tmp_path)
    saved, found = str(tmp_path / "saved"), []
    async with two_ranks(tmp_path, layout) as (trainers, url):
        for what in ("nothing", "save", "load"):
            if what == "save":
                await trainers.start(url, deadline_s=DEADLINE_S)
                await trainers.save(saved, deadline_s=DEADLINE_S)
            if what == "load":
                await trainers.start(url, deadline_s=DEADLINE_S)
                await trainers.load(saved, deadline_s=DEADLINE_S)
            found.append(
                [
                    (await trainers.train_step(step, groups_of(step), deadline_s=DEADLINE_S)).ranks
                    for step in range(2)
                ]
            )
    never_saved, after_save, after_load = found
    assert after_save == never_saved
    assert after_load == never_saved


async def test_a_new_learning_rate_holds_after_a_load(tmp_path: Path) -> None:
    Alone(DENSE, tmp_path)
    async with two_ranks(tmp_path, {"distributed": True}) as (trainers, url):
        await trainers.train_step(0, groups_of(0), deadline_s=DEADLINE_S)
        await trainers.save(str(tmp_path / "saved"), deadline_s=DEADLINE_S)
        (tmp_path / "new_rate").write_text(str(LR / 4))
        await trainers.start(url, deadline_s=DEADLINE_S)
        await trainers.load(str(tmp_path / "saved"), deadline_s=DEADLINE_S)
        found = await trainers.train_step(1, groups_of(1), deadline_s=DEADLINE_S)
        assert [rank["lr"] for rank in found.ranks] == pytest.approx([LR / 4 * 0.9] * 2)


async def test_losses_of_routers_have_the_weights_of_micro_batches(tmp_path: Path) -> None:
    """One rank has two micro-batches. The other has one, and repeats it with weight 0."""
    Alone(SPARSE, tmp_path)
    routers = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.1,
    }
    layout = {"rate": 0.0, "norm": 0.0, "routers": routers}
    async with two_ranks(tmp_path, layout) as (trainers, _):

        async def gradients(groups: list[list[TrainingSample]]) -> Any:
            await trainers.train_step(0, groups, deadline_s=DEADLINE_S)
            return (await trainers.call("gradients", None, deadline_s=DEADLINE_S))[0]

        groups = groups_of(0)[:3]
        single = [await gradients([group, group]) for group in groups]
        found = await gradients(groups)
        for name, gradient in found.items():
            expected = torch.stack([each[name] for each in single]).mean(0)
            assert torch.allclose(gradient, expected, atol=1e-5), name


@pytest.mark.parametrize("num_groups", [1, 3, 4])
async def test_virtual_stages_train_on_any_number_of_micro_batches(
    tmp_path: Path, num_groups: int
) -> None:
    alone = Alone({**DENSE, "num_hidden_layers": 4}, tmp_path)
    async with two_ranks(tmp_path, {"pp": 2, "vpp": 2}) as (trainers, _):
        groups = groups_of(0)[:num_groups]
        result = await trainers.train_step(0, groups, deadline_s=DEADLINE_S)
        loss, norm = alone.gradient(groups)
        for rank in result.ranks:
            assert rank["loss"] == pytest.approx(loss, rel=1e-4)
            assert rank["grad_norm"] == pytest.approx(norm, rel=1e-3)


async def test_mean_over_samples_does_not_depend_on_calculate_per_token_loss(
    tmp_path: Path,
) -> None:
    alone = Alone(DENSE, tmp_path)
    async with two_ranks(tmp_path, {"per_token": True}) as (trainers, _):
        result = await trainers.train_step(0, groups_of(0), deadline_s=DEADLINE_S)
        check_step(result.ranks, alone.step(0, LR), LR)


async def check_steps(
    trainers: TrainController, alone: Alone, folder: Path, restart_at: str
) -> None:
    """Make three steps, and repeat two from a checkpoint; with `restart_at`, new processes at this controller repeat them."""
    losses: dict[int, list[float]] = {}
    for step in range(3):
        if step == 1:
            await trainers.save(str(folder / "saved"), deadline_s=DEADLINE_S)
        result = await trainers.train_step(step, groups_of(step), deadline_s=DEADLINE_S)
        lr = LR * (1 - step / 10)
        check_step(result.ranks, alone.step(step, lr), lr)
        losses[step] = [rank["loss"] for rank in result.ranks]
    if restart_at:
        await trainers.start(restart_at, deadline_s=DEADLINE_S)
    # After a load, training continues with the saved momentum and learning rate.
    await trainers.load(str(folder / "saved"), deadline_s=DEADLINE_S)
    for step in (1, 2):
        result = await trainers.train_step(step, groups_of(step), deadline_s=DEADLINE_S)
        assert result.ranks[0]["lr"] == pytest.approx(LR * (1 - step / 10))
        assert [rank["loss"] for rank in result.ranks] == pytest.approx(losses[step], rel=1e-4)


def check_step(ranks: Any, expected: tuple[float, float], lr: float) -> None:
    loss, norm = expected
    for rank in ranks:
        assert rank["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert rank["lr"] == pytest.approx(lr)
        assert rank["skipped"] == 0
    # Each data-parallel rank reports the loss of its share of the samples.
    assert sum(rank["loss"] for rank in ranks) / len(ranks) == pytest.approx(loss, rel=1e-4)
