"""DeepSeek-V3 (latent attention, stacked experts, a persistent buffer) from trainer to engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from windlass.config import UpdateMode
from windlass.engines.embedded.model import load_model
from windlass.layout.dtypes import DType
from windlass.planning.planner import plan_transfer
from windlass.trainers.fsdp import describe_trainer
from windlass.transfer.bindings import LinkStatus
from windlass.transfer.receiver import Receiver
from windlass.transfer.sender import Sender
from windlass.transports.cma import CmaConfig
from windlass.transports.registry import create_transport

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("mode", UpdateMode)
def test_the_engine_computes_the_same_output_as_the_trainer(
    tmp_path: Path, mode: UpdateMode
) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(CONFIG))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**CONFIG)
    ).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor([3.0, -2.0, 0.5, 1.0]))
    trainer = describe_trainer(model, group="trainer", name_map=None)
    names = {spec.name for spec in trainer.manifest.tensors}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    transports = [create_transport(CmaConfig()) for _ in range(2)]
    shard = load_model(
        source, worker="engine/0", dtype=DType.FLOAT32, seed=9, transport=transports[0]
    )
    receiver = Receiver(transports[0], shard.manifest, shard.addresses, (shard.arena.region,))
    sender = Sender(transports[1], trainer.manifest, trainer.parameters)
    try:
        plan = plan_transfer([trainer.manifest], [shard.manifest])
        sender.connect(
            plan.parts(sending=True, all_names=True)["trainer/0"], [receiver.connect(plan, mode)]
        )
        sender.prepare()
        (outcome,) = sender.write(0, ["engine/0"], 10.0).links
        assert outcome.status is LinkStatus.OK, outcome.error
        assert receiver.verify(0, {"trainer/0": outcome.digest}) == ()
        receiver.apply()
        ids = torch.arange(12).reshape(1, -1)
        with torch.no_grad():
            assert torch.equal(shard.module(ids).logits, model(ids).logits)
    finally:
        sender.close()
        receiver.close()
        shard.arena.close()
        for transport in transports:
            transport.close()
