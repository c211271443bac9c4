"""Trainer tensors that no engine takes are refused before any write, unless harmless or allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
import torch
from flat_engine import flat_engine

import windlass
from windlass.errors import ConfigError, RoundAborted

TOKEN = "t" * 32


def linear(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(float(shape[0] * shape[1])).reshape(shape) + 3)


def tree(names: Sequence[str]) -> torch.nn.Module:
    """Return a module with a 4 x 3 parameter under each of these dotted names."""
    root = torch.nn.Module()
    for name in names:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, linear(4, 3))
    return root


SERVED = ("model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.norm.weight")


async def published(
    module: torch.nn.Module,
    *,
    engines: Sequence[Sequence[str]] = (SERVED,),
    allow_unused: Sequence[str] = (),
    change: Callable[[], None] | None = None,
) -> windlass.UpdateReport:
    """Publish once to engines with these tensors and check their values."""
    async with windlass.Controller(
        token=TOKEN, config=windlass.ControlConfig(min_engines=len(engines))
    ) as controller:

        def update() -> windlass.UpdateReport:
            with ExitStack() as undo:
                held = [
                    undo.enter_context(
                        flat_engine(
                            controller.url,
                            TOKEN,
                            {name: torch.zeros(4, 3) for name in names},
                            name=f"engine-{number}",
                        )
                    )
                    for number, names in enumerate(engines)
                ]
                trainer = undo.enter_context(
                    windlass.connect_trainer(
                        module, controller=controller.url, token=TOKEN, allow_unused=allow_unused
                    )
                )
                try:
                    report = trainer.publish(1, deadline_s=30).result()
                except RoundAborted:
                    assert all((t == 1).all() for tensors in held for t in tensors.values())
                    raise
                trained = dict(module.named_parameters(remove_duplicate=False))
                for tensors in held:
                    for name, tensor in tensors.items():
                        assert torch.equal(tensor, trained[name]), name
                return report

        return await asyncio.to_thread(update)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (
            "model.layers.1.mlp.weight",
            "no engine takes 'model.layers.1.mlp.weight', and no pattern",
        ),
        (
            "model.layers.0.mlp.bias",
            r"pass this to the trainer: allow_unused=\('model.layers.0.mlp.bias',\)",
        ),
        ("value_head.weight", "value_head"),
        ("model.visual.patch_embed.weight", "model.visual"),
        (
            "lm_head.weight",
            "engines use 'model.embed_tokens.weight' in place of 'lm_head.weight'.* keep the two tied",
        ),
    ],
)
async def test_tensor_that_no_engine_takes_refuses_the_update(extra: str, says: str) -> None:
    with pytest.raises(RoundAborted, match=says):
        await published(tree((*SERVED, extra)))


async def test_patterns_advised_by_the_refusal_allow_the_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = tree((*SERVED, "value_head.weight", "model.layers.1.a", "model.layers.2.a"))
    report = await published(module, allow_unused=("model.layers.*.a", "value_head.weight"))
    assert report.unused == {"model.layers.*.a": 2, "value_head.weight": 1}
    (line,) = [r.getMessage() for r in caplog.records if "no engine takes" in r.getMessage()]
    assert (
        line
        == "no engine takes these trainer tensors: 2 of 'model.layers.*.a', 'value_head.weight'"
    )


@pytest.mark.parametrize(
    "extra",
    [
        ("mtp.layers.0.mlp.weight", "mtp.fc.weight"),
        ("model.mtp_layers.0.mlp.weight",),
        ("model.layers.1.eh_proj.weight", "model.layers.1.mlp.weight"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq",),
        ("model.embed_positions.position_ids",),
    ],
)
async def test_layers_for_further_tokens_and_rotary_tables_need_no_pattern(
    extra: tuple[str, ...],
) -> None:
    report = await published(tree((*SERVED, *extra)))
    assert sum(report.unused.values()) == len(extra)


async def test_copies_of_embedding_and_head_in_a_layer_that_drafts_need_no_pattern() -> None:
    layer = ("model.layers.1.eh_proj.weight", "model.layers.1.mlp.weight")
    copies = ("model.layers.1.embed_tokens.weight", "model.layers.1.shared_head.head.weight")
    names = (*SERVED, *layer, *copies)
    report = await published(tree(names), engines=((*SERVED, *layer),))
    assert sum(report.unused.values()) == len(copies)


async def test_buffers_and_second_names_of_one_memory_need_no_pattern() -> None:
    module = tree((*SERVED, "lm_head.weight"))
    module.register_buffer("running_mean", torch.ones(2))
    head = module.get_submodule("lm_head")
    head.weight.data = module.get_parameter("model.embed_tokens.weight").data
    report = await published(module)
    assert report.unused == {"lm_head.weight": 1, "running_mean": 1}


async def test_tensor_that_one_of_several_engines_takes_is_used() -> None:
    names = (*SERVED, "draft.fc.weight")
    report = await published(tree(names), engines=(SERVED, names))
    assert report.unused == {}


async def test_an_engine_that_leaves_does_not_make_its_tensors_unused() -> None:
    names = (*SERVED, "draft.fc.weight")
    async with windlass.Controller(token=TOKEN) as controller:

        def update() -> windlass.UpdateReport:
            like = {name: torch.zeros(4, 3) for name in names}
            with (
                flat_engine(controller.url, TOKEN, {n: like[n] for n in SERVED}, name="plain"),
                windlass.connect_trainer(
                    tree(names), controller=controller.url, token=TOKEN
                ) as trainer,
            ):
                with flat_engine(controller.url, TOKEN, like, name="draft"):
                    trainer.publish(1, deadline_s=30)
                return trainer.publish(2, deadline_s=30).result()

        report = await asyncio.to_thread(update)
        assert report.engines == ("plain",)


def test_patterns_must_be_a_sequence_of_strings() -> None:
    for wrong in ("value_head.*", (3,), ("",)):
        with pytest.raises(ConfigError, match="allow_unused: must be a sequence of patterns"):
            windlass.connect_trainer(
                torch.nn.Linear(2, 2),
                controller="http://127.0.0.1:9",
                token=TOKEN,
                allow_unused=wrong,  # type: ignore[arg-type]
            )
