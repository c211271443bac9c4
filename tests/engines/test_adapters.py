"""LoRA: the trainer publishes only the adapter, through the same call and the same transaction."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
import torch
import transformers

import windlass
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.engines.client import EngineClient, EngineWeights
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.layout.naming.adapters import adapter_names
from windlass.transfer.dtensor import describe_module
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

TOKEN = "secret of the test"
RANK, TP = 4, 2
TARGETS = ["q_proj", "v_proj", "down_proj"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def adapted_model() -> torch.nn.Module:
    # This import takes seconds. At the top of the file every test worker would spend them.
    from peft import LoraConfig, get_peft_model

    config = transformers.Qwen3Config(
        vocab_size=66,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    peft = get_peft_model(model, LoraConfig(r=RANK, target_modules=TARGETS))
    peft.add_adapter("other", LoraConfig(r=2, target_modules=TARGETS))
    first = 1
    with torch.no_grad():
        for parameter in peft.parameters():
            values = torch.arange(first, first + parameter.numel(), dtype=torch.float32)
            parameter.copy_(values.reshape(parameter.shape))
            first += parameter.numel()
    module: torch.nn.Module = peft
    return module


def saved_by_peft(model: torch.nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    saved: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=adapter)
    return saved


@dataclass
class ServingHooks:
    """Engine hooks that record their calls."""

    calls: list[str] = field(default_factory=list)
    version: int = -1

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:
        self.calls.append("pause")

    def resume(self, deadline_s: float) -> None:
        self.calls.append("resume")

    def finalise(self) -> None:
        self.calls.append("finalise")

    def set_version(self, version: int, deadline_s: float) -> None:
        self.version = version


class AdapterEngine:
    """One rank of an engine that serves an adapter in bfloat16.

    As in SGLang and vLLM, B of column-parallel layers is cut by rows and A of row-parallel layers by columns.
    """

    def __init__(self, rank: int, adapter: dict[str, torch.Tensor], url: str) -> None:
        self.adapter = adapter
        self.boxes: dict[str, Box] = {}
        self.memory: dict[str, torch.Tensor] = {}
        builder = ManifestBuilder(f"lora/{rank}", Role.ENGINE)
        for name, tensor in adapter.items():
            offsets, sizes = [0, 0], list(tensor.shape)
            dim = {("down_proj", "A"): 1, ("q_proj", "B"): 0, ("v_proj", "B"): 0}.get(
                (name.split(".")[-3], name.split(".lora_")[1][0])
            )
            if dim is not None:
                sizes[dim] //= TP
                offsets[dim] = rank * sizes[dim]
            self.boxes[name] = Box(tuple(offsets), tuple(sizes))
            self.memory[name] = torch.zeros(sizes, dtype=torch.bfloat16)
            nbytes = self.memory[name].nbytes
            builder.add_parameter(name, nbytes=nbytes, dtype=DType.BFLOAT16)
            builder.add_shard(name, tuple(tensor.shape), self.boxes[name], name)
        manifest = builder.build()
        transport = create_transport(CmaConfig())
        addresses = [m.data_ptr() for m in self.memory.values()]
        regions = [transport.register(m.data_ptr(), m.nbytes) for m in self.memory.values()]
        self.hooks = ServingHooks()
        self.client = EngineClient(
            EngineWeights(
                manifest=manifest,
                addresses=addresses,
                regions=regions,
            ),
            transport=transport,
            hooks=self.hooks,
            controller=url,
            token=TOKEN,
            world_size=TP,
            can_send=False,
        )

    def check(self) -> None:
        for name, box in self.boxes.items():
            part = tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
            assert torch.equal(self.memory[name], self.adapter[name][part].bfloat16()), name

    def close(self) -> None:
        self.client.close()


def test_the_name_map_keeps_exactly_what_peft_saves() -> None:
    model = adapted_model()
    for adapter in ("default", "other"):
        found = describe_module(model, "trainer/0", Role.TRAINER, name_map=adapter_names(adapter))
        saved = saved_by_peft(model, adapter)
        assert {spec.name: spec.shape for spec in found.tensors} == {
            name: tuple(tensor.shape) for name, tensor in saved.items()
        }
        assert found.nbytes == sum(tensor.nbytes for tensor in saved.values())


@pytest.mark.parametrize("mode", UpdateMode)
async def test_publish_sends_only_the_adapter_and_updates_it(
    mode: UpdateMode,
) -> None:
    model = adapted_model()
    saved = saved_by_peft(model)
    async with windlass.Controller(token=TOKEN, config=ControlConfig(mode=mode)) as controller:

        def train_and_publish() -> None:
            engines = [AdapterEngine(rank, saved, controller.url) for rank in range(TP)]
            try:
                with windlass.connect_trainer(
                    model, controller=controller.url, token=TOKEN, name_map=adapter_names()
                ) as trainer:
                    for version in range(2):
                        with torch.no_grad():
                            for name, parameter in model.named_parameters():
                                if "lora" in name:
                                    parameter.mul_(-1.5)
                        report = trainer.publish(version).result()
                        assert report.nbytes == sum(
                            m.nbytes for e in engines for m in e.memory.values()
                        )
                        for engine in engines:
                            engine.adapter = saved_by_peft(model)
                            engine.check()
                            assert engine.hooks.version == version
                            assert engine.hooks.calls[-3:] == ["pause", "finalise", "resume"]
            finally:
                for engine in engines:
                    engine.close()

        await asyncio.to_thread(train_and_publish)
