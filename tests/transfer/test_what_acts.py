"""Parameters are refused if the model computes with other values than theirs, or saves other values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers
from test_changes_after_begin import base_names
from torch.nn.utils import parametrizations, prune

from windlass.errors import PlanError, UnsupportedLayout
from windlass.layout.manifest import ShardManifest
from windlass.trainers import adapter_names
from windlass.trainers.fsdp import describe_trainer
from windlass.trainers.weights import TrainerWeights


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 4, bias=False)
        self.head = torch.nn.Linear(4, 6, bias=False)


def adapted(**settings: Any) -> Any:
    config = peft.LoraConfig(
        r=2, target_modules=["gate"], **{"init_lora_weights": False, **settings}
    )
    return peft.get_peft_model(Tiny(), config)


def begin(weights: TrainerWeights) -> None:
    """Record the state of the parameters, as the client does when an update begins."""
    assert weights.watch is not None
    weights.watch()


def described(module: torch.nn.Module, name_map: Callable[[str], str | None] | None) -> Any:
    return describe_trainer(module, group="trainer", name_map=name_map)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_a_base_is_published_only_while_its_adapters_are_merged(use_dora: bool) -> None:
    model = adapted(use_dora=use_dora)
    weights = described(model, base_names)
    with pytest.raises(PlanError, match=r"gate.base_layer.weight.*'default'.*merge_adapter"):
        begin(weights)
    model.merge_adapter()
    begin(weights)
    model.unmerge_adapter()
    with pytest.raises(PlanError, match="must be merged or published"):
        begin(weights)
    model.base_model.disable_adapter_layers()
    begin(weights)


def test_a_second_active_adapter_must_be_merged_too() -> None:
    model = adapted()
    model.add_adapter("b", peft.LoraConfig(r=2, target_modules=["gate"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "b"])
    weights = described(model, base_names)
    model.merge_adapter(["default"])
    with pytest.raises(PlanError, match="adapter 'b'"):
        begin(weights)


def test_an_adapter_that_adds_nothing_may_be_left_out() -> None:
    begin(described(adapted(init_lora_weights=True), base_names))


def test_an_adapter_alone_is_published_unmerged() -> None:
    begin(described(adapted(), adapter_names()))


def test_the_original_of_a_trained_copy_is_refused() -> None:
    def original(name: str) -> str | None:
        mapped = None if "modules_to_save" in name else base_names(name)
        return mapped and mapped.replace(".original_module", "")

    model = adapted(modules_to_save=["head"])
    model.merge_adapter()
    weights = described(model, original)
    with pytest.raises(PlanError, match="trained copy"):
        begin(weights)


def test_adapter_names_are_those_that_peft_saves_for_dora() -> None:
    model = adapted(use_dora=True, modules_to_save=["head"])
    manifest: ShardManifest = described(model, adapter_names()).manifest
    saved = peft.get_peft_model_state_dict(model)
    assert {tensor.name for tensor in manifest.tensors} == saved.keys()


def by_hook(model: Tiny) -> None:
    def double(module: Any, saved: dict[str, torch.Tensor], prefix: str, _: Any) -> None:
        saved[f"{prefix}weight"] = saved[f"{prefix}weight"] * 2

    model.gate.register_state_dict_post_hook(double)  # type: ignore[no-untyped-call]


class Shifted(torch.nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] + 1


def by_override(model: Tiny) -> None:
    model.gate = Shifted(4, 4, bias=False)


@pytest.mark.parametrize("rewrite", [by_hook, by_override])
def test_values_that_state_dict_changes_are_refused(rewrite: Callable[[Tiny], None]) -> None:
    model = Tiny()
    rewrite(model)
    with pytest.raises(UnsupportedLayout, match=r"'gate.weight'.*state_dict"):
        described(model, None)


def test_hooks_that_keep_or_rename_values_are_accepted() -> None:
    model = Tiny()

    def copy(module: Any, saved: dict[str, torch.Tensor], prefix: str, _: Any) -> None:
        saved[f"{prefix}weight"] = saved[f"{prefix}weight"].clone()
        saved[f"{prefix}other"] = saved[f"{prefix}weight"] * 2

    model.gate.register_state_dict_post_hook(copy)  # type: ignore[no-untyped-call]
    described(model, None)


class Halved(torch.nn.Module):
    """A module that computes its weight in a property, from a parameter of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = torch.nn.Parameter(torch.randn(4, 4))

    @property
    def weight(self) -> torch.Tensor:
        return self.raw / 2


class Renamed(Halved):
    @property
    def weight(self) -> torch.Tensor:
        return self.raw


def with_gate(gate: torch.nn.Module) -> Tiny:
    model = Tiny()
    vars(model)["_modules"]["gate"] = gate
    return model


LINEAR = partial(torch.nn.Linear, 4, 4, bias=False)
NORMS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "weight norm": (lambda: parametrizations.weight_norm(LINEAR()), "original1"),
    "spectral norm": (lambda: parametrizations.spectral_norm(LINEAR()), "original"),
    "orthogonal": (lambda: parametrizations.orthogonal(LINEAR()), "original"),
    "old weight norm": (lambda: torch.nn.utils.weight_norm(LINEAR()), "weight_v"),
    "old spectral norm": (lambda: torch.nn.utils.spectral_norm(LINEAR()), "weight_orig"),
    "pruned": (lambda: prune.l1_unstructured(LINEAR(), "weight", amount=0.5), "weight_orig"),  # type: ignore[no-untyped-call]
    "property": (Halved, "raw"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_an_original_is_not_published_as_the_tensor_computed_from_it(
    norm: str, prefix: str
) -> None:
    make, original = NORMS[norm]

    def onto_weight(name: str) -> str | None:
        if name == "head.weight":
            return prefix + name
        return f"{prefix}gate.weight" if name.endswith(f".{original}") else None

    with pytest.raises(
        UnsupportedLayout,
        match=rf"'gate\..*{original}'.*'{prefix}gate.weight', because the module computes 'weight'",
    ):
        described(with_gate(make()), onto_weight)


@pytest.mark.parametrize("make", [lambda: parametrizations.weight_norm(LINEAR()), Renamed])
def test_originals_are_published_under_their_own_names(make: Callable[[], torch.nn.Module]) -> None:
    renamed = {"gate.raw": "gate.weight"}
    described(with_gate(make()), lambda name: f"model.{renamed.get(name, name)}")


def test_originals_of_weight_norm_may_get_their_names_of_older_checkpoints() -> None:
    older = {"original0": "gate.weight_g", "original1": "gate.weight_v"}
    model = with_gate(parametrizations.weight_norm(LINEAR()))
    described(model, lambda name: older.get(name.rpartition(".")[2], name))


def with_second(**settings: Any) -> Any:
    model = adapted(**settings)
    second = peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    model.add_adapter("b", second)
    model.base_model.set_adapter(["default", "b"])
    return model


def test_a_second_active_adapter_is_not_left_out_beside_a_published_adapter() -> None:
    model = with_second()
    weights = described(model, adapter_names())
    with pytest.raises(PlanError, match=r"head.lora_A.b.weight.*'b' is active or merged"):
        begin(weights)
    model.base_model.set_adapter("default")
    begin(weights)
    model.merge_adapter(["b"])
    with pytest.raises(PlanError, match="'b' is active or merged"):
        begin(weights)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("change", ["set_scale", "scale_layer", "dict"])
def test_a_published_adapter_must_have_the_scale_of_its_configuration(
    change: str, use_rslora: bool
) -> None:
    model = adapted(use_rslora=use_rslora, lora_alpha=5)
    weights = described(model, adapter_names())
    begin(weights)
    layer = model.base_model.model.gate
    if change == "set_scale":
        layer.set_scale("default", 0.5)
    elif change == "scale_layer":
        layer.scale_layer(2.0)
    else:
        layer.scaling["default"] *= 3
    with pytest.raises(PlanError, match=r"gate.lora_A.*'default' must have the scale"):
        begin(weights)
    layer.unscale_layer()
    begin(weights)


class Words(torch.nn.Module):
    """A model with an embedding that may share its weight with the head, which has the first name."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.embed = torch.nn.Embedding(8, 4)
        self.gate = torch.nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def merged_names(name: str) -> str | None:
    if "lora_" in name or "trainable_tokens" in name:
        return None
    name = name.removeprefix("base_model.model.").replace(".token_adapter", "")
    return name.replace(".base_layer", "")


TOKENS = {"target_modules": ["gate"], "trainable_token_indices": {"embed": [1, 2]}}
ON_WORDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["gate", "embed"]},
    "tokens": {**TOKENS, "init_lora_weights": True},
}


def on_words(kind: str, *, tied: bool) -> Any:
    settings = {"init_lora_weights": False, **ON_WORDS[kind]}
    model = peft.get_peft_model(Words(tied=tied), peft.LoraConfig(r=2, **settings))
    if kind == "tokens":
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.data += 1
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ON_WORDS)
def test_an_adapter_of_an_embedding_must_be_merged_also_under_a_tied_name(
    kind: str, tied: bool
) -> None:
    model = on_words(kind, tied=tied)
    weights = described(model, merged_names)
    with pytest.raises(PlanError, match="must be merged or published"):
        begin(weights)
    model.merge_adapter()
    if tied:
        with pytest.raises(PlanError, match=r"must not be tied to '.*' while an adapter is"):
            begin(weights)
    else:
        begin(weights)


class TiedWords(torch.nn.Module):
    """A model that tells PEFT which weights are tied."""

    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        words = Words(tied=True)
        self.embed, self.head, self.gate = words.embed, words.head, words.gate
        self.config = transformers.PretrainedConfig(tie_word_embeddings=True)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed


def test_merged_tokens_that_act_under_both_tied_names_are_published() -> None:
    config = peft.LoraConfig(r=2, **TOKENS)
    model = peft.get_peft_model(TiedWords(), config)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data += 1
    assert "head.token_adapter" in str([name for name, _ in model.named_modules()])
    weights = described(model, merged_names)
    model.merge_adapter()
    begin(weights)


def test_trained_tokens_are_not_left_out_beside_a_published_adapter() -> None:
    weights = described(on_words("tokens", tied=False), adapter_names())
    with pytest.raises(PlanError, match=r"trainable_tokens_delta.*is active or merged"):
        begin(weights)


@pytest.mark.parametrize("kind", ON_WORDS)
@pytest.mark.parametrize("pattern", ["embed.weight", "embed*", "*.weight", "*embed.weight"])
def test_engines_do_not_keep_an_embedding_that_an_adapter_changes(pattern: str, kind: str) -> None:
    model = on_words(kind, tied=False)

    def without_embedding(name: str) -> str | None:
        return None if "embed" in name else merged_names(name)

    with pytest.raises(PlanError, match=r"keep: must not match '.*embed.weight'.*merge_adapter"):
        describe_trainer(model, group="trainer", name_map=without_embedding, keep=(pattern,))
    describe_trainer(model, group="trainer", name_map=merged_names, keep=(pattern,))
    describe_trainer(model, group="trainer", name_map=without_embedding, keep=("visual.*",))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name)
    describe_trainer(model, group="trainer", name_map=without_embedding, keep=(pattern,))
