"""A transformers model is described as `save_pretrained` writes it, whole and sharded by FSDP2."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import conversion_mapping, core_model_loading

from windlass.errors import ConfigError, UnsupportedLayout
from windlass.layout.box import Box
from windlass.layout.manifest import Role, ShardManifest
from windlass.layout.naming.adapters import adapter_names
from windlass.transfer import saved_names
from windlass.transfer.dtensor import describe_module, held_tensors, local_tensor

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SMALL: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Mapping[str, Any] = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
MORE_EXPERTS: Mapping[str, Any] = {
    **SMALL,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
FULL = ["full_attention"] * 2
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": EXPERTS,
    "phimoe": EXPERTS,
    "minimax": {**EXPERTS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "minimax_m2": {**EXPERTS, "head_dim": 8, "rotary_dim": 4},
    "granitemoe": EXPERTS,
    "jamba": {**MORE_EXPERTS, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {**MORE_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "nemotron_h": {
        **SMALL,
        "layers_block_type": ["mamba", "moe"],
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "head_dim": 8,
    },
    "gpt_neox": SMALL,
    "ernie4_5_moe": {**SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "hunyuan_v1_moe": {**MORE_EXPERTS, "head_dim": 8, "moe_topk": 2},
    "hrm_text": {**SMALL, "num_layers_per_stack": 2},
    "gpt_oss": {**EXPERTS, "head_dim": 8, "layer_types": FULL},
    "qwen3_moe": {**MORE_EXPERTS, "head_dim": 8},
    "olmoe": MORE_EXPERTS,
    "qwen3_5_moe_text": {**MORE_EXPERTS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    "zamba2": {**SMALL, "layer_types": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4, "num_mem_blocks": 1},
    "qwen2_5_vl": {"text_config": SMALL, "vision_config": VISION},
    "qwen3_vl_moe": {"text_config": {**MORE_EXPERTS, "head_dim": 8}, "vision_config": VISION},
}  # fmt: skip
CONV3D = "visual.patch_embed.proj.weight"


def built(name: str) -> Any:
    config = transformers.AutoConfig.for_model(name, **MODELS[name])
    maps = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForImageTextToText,
    )
    kind = next(each for each in maps if type(config) in each._model_mapping)
    model = kind.from_config(config, dtype=torch.float32)
    first = 1
    with torch.no_grad():
        seen: set[int] = set()
        for tensor in model.state_dict(keep_vars=True).values():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                numbers = torch.arange(first, first + tensor.numel()).reshape(tensor.shape)
                tensor.copy_(numbers)
                first += tensor.numel()
    assert first < 1 << 24, "elements must be distinct"
    return model


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def gathered(model: torch.nn.Module, manifest: ShardManifest) -> dict[str, torch.Tensor]:
    """Return tensors assembled from this rank's memory, with NaN for missing elements."""
    memory = {held.name: local_tensor(held.tensor) for held in held_tensors(model)}
    found = {
        spec.name: torch.full(spec.shape, torch.nan, dtype=torch.float64)
        for spec in manifest.tensors
    }
    for shard in manifest.shards():
        local = memory[shard.parameter]
        size = local.element_size()
        view = local.as_strided(
            shard.box.sizes,
            [step // size for step in shard.strides_bytes],
            local.storage_offset() + shard.offset_bytes // size,
        )
        box = tuple(slice(o, e) for o, e in zip(shard.box.offsets, shard.box.ends, strict=True))
        found[shard.tensor][box] = view.double()
    return found | {alias: found[name] for alias, name in manifest.aliases.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_described_as_it_is_saved(name: str, tmp_path: Path) -> None:
    model = built(name)
    want = saved(model, tmp_path)
    found = gathered(model, describe_module(model, "trainer/0", Role.TRAINER))
    assert want.keys() <= found.keys()
    for tensor, values in want.items():
        assert torch.equal(found[tensor], values.double()), tensor
    assert not any(values.isnan().any() for values in found.values())


class Policy(torch.nn.Module):
    """User module with a model and a value head."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.llm = model
        self.value_head = torch.nn.Linear(32, 1)


def of_policy(name: str) -> str | None:
    return name.removeprefix("llm.") if name.startswith("llm.") else None


def merged(name: str) -> str | None:
    """Return the base model's name of a PEFT parameter, as the page on trainers and TRL's plug do."""
    name = name.removeprefix("base_model.model.")
    return None if "lora_" in name else name.replace(".base_layer", "")


def with_adapters(model: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=r".*(q_proj|query_key_value|in_proj)")
    return peft.get_peft_model(model, config)


WRAPPED: Mapping[str, tuple[Callable[[Any], Any], Callable[[str], str | None]]] = {
    "identity": (lambda model: model, lambda name: name),
    "compiled": (lambda model: torch.compile(model), lambda name: name),
    "policy": (Policy, of_policy),
    "peft": (with_adapters, merged),
    "policy_of_peft": (
        lambda model: Policy(with_adapters(model)),
        lambda name: None if (found := of_policy(name)) is None else merged(found),
    ),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "hrm_text", "qwen3_moe", "zamba2"])
def test_a_name_map_applies_before_the_conversion_of_transformers(
    name: str, wrapped: str, tmp_path: Path
) -> None:
    """A `name_map` disabled conversion: Mixtral and GPT-NeoX in PEFT or wrappers were refused."""
    model = built(name)
    want = saved(model, tmp_path)
    wrap, name_map = WRAPPED[wrapped]
    module = wrap(model)
    manifest = describe_module(module, "trainer/0", Role.TRAINER, name_map=name_map)
    found = gathered(module, manifest)
    assert want.keys() <= found.keys()
    for tensor, values in want.items():
        assert torch.equal(found[tensor], values.double()), tensor


def test_names_of_a_name_map_stay_unless_they_are_the_models_names() -> None:
    model = with_adapters(built("mixtral"))
    manifest = describe_module(model, "trainer/0", Role.TRAINER, name_map=adapter_names())
    assert {t.name for t in manifest.tensors} == set(peft.get_peft_model_state_dict(model))
    finished = describe_module(
        built("mixtral"), "trainer/0", Role.TRAINER, name_map=lambda name: f"policy.{name}"
    )
    assert all(
        t.name.startswith("policy.model.") or t.name == "policy.lm_head.weight"
        for t in finished.tensors
    )


def test_a_name_map_leaves_tensors_out_before_the_conversion(tmp_path: Path) -> None:
    model = built("mixtral")
    want = {name for name in saved(model, tmp_path) if ".layers.1." in name}
    manifest = describe_module(
        model, "trainer/0", Role.TRAINER, name_map=lambda n: n if ".layers.1." in n else None
    )
    assert {tensor.name for tensor in manifest.tensors} == want


def test_two_parameters_of_one_name_are_refused_before_the_conversion() -> None:
    model = built("mixtral")
    other = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(
        ConfigError, match=r"must give each parameter its own name.*layers\.0.*layers\.1"
    ):
        describe_module(
            model,
            "trainer/0",
            Role.TRAINER,
            name_map=lambda n: other.replace(".1.", ".0.") if n == other else n,
        )


def test_a_parameter_with_the_name_of_a_converted_tensor_is_refused() -> None:
    model = built("mixtral")
    expert = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    manifest = describe_module(model, "trainer/0", Role.TRAINER)
    (shape,) = [spec.shape for spec in manifest.tensors if spec.name == expert]
    model.extra = torch.nn.Parameter(torch.zeros(shape))
    with pytest.raises(ConfigError, match=rf"'{expert}' for both 'extra' and .*experts"):
        describe_module(
            model,
            "trainer/0",
            Role.TRAINER,
            name_map=lambda name: expert if name == "extra" else name,
        )


def test_given_rules_for_stacked_experts_switch_the_conversion_off() -> None:
    model = built("mixtral")
    manifest = describe_module(model, "t/0", Role.TRAINER, name_map=lambda n: n, stacked=())
    assert {t.name for t in manifest.tensors} == set(dict(model.named_parameters()))


def test_the_chosen_models_have_other_names_and_many_parts(tmp_path: Path) -> None:
    """The test above needs models with other module names, and tensors with five dims."""
    model = built("mixtral")
    assert not set(model.state_dict()) >= set(saved(model, tmp_path / "mixtral"))
    many = describe_module(built("hrm_text"), "trainer/0", Role.TRAINER)
    of_tensor: dict[str, set[str]] = {}
    for shard in many.shards():
        of_tensor.setdefault(shard.tensor, set()).add(shard.parameter)
    assert max(map(len, of_tensor.values())) > 1, "no tensor is made of several parameters"
    vision = describe_module(built("qwen2_5_vl"), "trainer/0", Role.TRAINER)
    assert max(len(spec.shape) for spec in vision.tensors if spec.name.endswith(CONV3D)) == 5


SHARDED = ("mixtral", "gpt_neox", "hrm_text", "phimoe", "gpt_oss", "qwen2_5_vl")
WORLD_SIZE = 3


def check_sharded(name: str, folder: Path) -> None:
    want = load_file(folder / name / "model.safetensors")
    for dim in (0, 1):
        model = built(name)
        try:
            fully_shard(model, shard_placement_fn=lambda p, d=dim: torch.distributed.tensor.Shard(d if p.dim() > d else 0))  # type: ignore[misc]  # fmt: skip
        except (NotImplementedError, AssertionError, ValueError):
            assert dim, "FSDP2 refuses some uneven cuts of other dims"
            continue
        compiled: torch.nn.Module = torch.compile(model)  # type: ignore[assignment]
        manifest = describe_module(compiled, f"trainer/{dist.get_rank()}", Role.TRAINER)
        found = gathered(compiled, manifest)
        held = {k: (~v.isnan()).double() for k, v in found.items()}
        for tensor, values in want.items():
            part = found.get(tensor, torch.full(values.shape, torch.nan)).double()
            mine = held.get(tensor, torch.zeros(values.shape)).double()
            assert torch.equal(part[mine.bool()], values.double()[mine.bool()]), (tensor, dim)
            dist.all_reduce(mine)
            assert (mine >= 1).all(), (tensor, dim)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE
    )
    for name in SHARDED:
        check_sharded(name, Path(folder))
    dist.destroy_process_group()


def test_shards_of_all_ranks_make_up_the_saved_tensors(tmp_path: Path) -> None:
    for name in SHARDED:
        saved(built(name), tmp_path / name)
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        run_rank, (str(tmp_path),), nprocs=WORLD_SIZE, start_method="forkserver"
    )


def chain(tensors: list[torch.Tensor], dice: random.Random) -> list[torch.Tensor]:
    """Move elements in ways that conversions may use. Equal dice give equal moves."""
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(tensors))
        one = tensors.pop(at)
        dim = dice.randrange(one.dim())
        size = one.shape[dim]
        made: list[torch.Tensor] = [one]
        match dice.randrange(8):
            case 0 if size > 1:
                made = list(one.chunk(2, dim))
            case 1 if one.dim() > 1:
                made = [one.transpose(dim, dice.randrange(one.dim())).contiguous()]
            case 2 if size % 2 == 0:
                made = [one.reshape(*one.shape[:dim], size // 2, 2, *one.shape[dim + 1 :])]
            case 3 if dim + 1 < one.dim():
                made = [one.flatten(dim, dim + 1)]
            case 4:
                made = [torch.cat([one.narrow(dim, size // 2, size - size // 2), one.narrow(dim, 0, size // 2)], dim)]  # fmt: skip
            case 5 if size <= 4 and one.dim() > 1:
                made = [part.squeeze(dim) for part in torch.split(one, 1, dim)]
            case 6 if size > 1:
                first = size // 3 + 1
                made = [*torch.split(one, [first, size - first], dim)]
            case 7:
                made = [one.unsqueeze(dim)]
            case _:
                pass
        tensors[at:at] = [part for part in made if part.dim() <= 5]
        tensors.extend(part.flatten() for part in made if part.dim() > 5)
    return tensors


def held_part(shape: tuple[int, ...], dice: random.Random) -> Box:
    """Return a range of one dim, as a rank may hold it."""
    dim = dice.randrange(len(shape))
    low = dice.randrange(shape[dim])
    size = dice.randint(1, shape[dim] - low)
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = low, size
    return Box(tuple(offsets), tuple(sizes))


@pytest.mark.parametrize("seed", range(4))
def test_every_operation_that_moves_elements_is_followed(seed: int) -> None:
    dice = random.Random(seed)
    compared = 0
    for _ in range(400):
        shape = tuple(dice.choice((1, 2, 3, 4, 6, 8)) for _ in range(dice.randint(1, 4)))
        real = torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape)
        recipe = dice.getrandbits(32)
        box = held_part(shape, dice)
        local = real[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]
        local = local.contiguous().clone()
        held = saved_names.HeldPart("w", shape, real.dtype, box, local.stride())
        want = chain([real], random.Random(recipe))
        have = chain([saved_names.watched(held)], random.Random(recipe))
        for expected, made in zip(want, have, strict=True):
            assert made.shape == expected.shape
            seen = torch.full(expected.shape, torch.nan, dtype=torch.float64)
            for source, part in saved_names.placed_pieces({"t": made}):
                assert (source, part.tensor, part.global_shape) == ("w", "t", tuple(made.shape))
                region = tuple(
                    slice(o, e) for o, e in zip(part.box.offsets, part.box.ends, strict=True)
                )
                assert seen[region].isnan().all(), "an element occurs twice"
                seen[region] = local.as_strided(part.box.sizes, part.strides, part.offset)
            here = torch.isin(expected, local)
            assert torch.equal(seen[here], expected[here])
            assert seen[~here].isnan().all()
            compared += int(here.any())
    assert compared > 400


class Doubled(core_model_loading.ConversionOps):  # type: ignore[misc]
    """Conversion to a computed tensor, which a checkpoint does not contain."""

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {name: tensors[0] * 2 for name, tensors in input_dict.items()}

    @property
    def reverse_op(self) -> core_model_loading.ConversionOps:
        return self


def test_a_tensor_that_transformers_computes_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = built("gpt_neox")
    doubled = core_model_loading.WeightConverter(
        "mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.weight", operations=[Doubled()]
    )
    monkeypatch.setattr(
        conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [doubled]
    )
    with pytest.raises(
        UnsupportedLayout, match=r"must only copy and rearrange.*aten\.mul.*pass `name_map`"
    ):
        describe_module(model, "trainer/0", Role.TRAINER)
    assert describe_module(model, "trainer/0", Role.TRAINER, stacked=()).parameters


def test_a_failing_conversion_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise KeyError("no such attribute")

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", broken)
    with pytest.raises(UnsupportedLayout, match=r"GPTNeoXForCausalLM.*KeyError.*no such attribute"):
        describe_module(built("gpt_neox"), "trainer/0", Role.TRAINER)
