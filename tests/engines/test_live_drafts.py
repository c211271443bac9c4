"""Updates reach a server that drafts tokens with a frozen draft model, and its answers stay those of its weights.

A trainer publishes the served model. The draft model keeps its weights, because no trainer has them. The server drafts after
every update. Its greedy tokens and logprobs then equal those of a fresh server that drafts nothing. For `draft_model`
the draft is a copy of the weights that the server starts with: the server accepts every draft before the first update.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_servers import require_equal_answers, serving_fresh
from live_updates import Counter, update_beside
from rows import Record, of_setting
from safetensors.torch import save_file
from servers import (
    CONFIGS,
    HTTP_S,
    VENVS,
    Layout,
    Server,
    build,
    engine_version,
    environment,
    save,
    serving,
)

import windlass
from windlass.config import UpdateMode

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND = "drafted"
# EAGLE-3 reads the hidden states of three layers, whose numbers are distinct from 6 layers on.
CONFIGS[KIND] = {**CONFIGS["dense"], "num_hidden_layers": 8}
PROMPTS = ([5, 9, 33, 101] * 8, [7, 7, 1, 200, 14, 3, 90], [120])
NUM_TOKENS = 24
NUM_DRAFTS = 3
FLOAT32 = ("--dtype", "float32")


def eagle3(folder: Path) -> Path:
    """Save an EAGLE-3 draft model of random weights, which reads hidden states of the served model."""
    target = CONFIGS[KIND]
    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings",
    )  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "draft_vocab_size": target["vocab_size"], "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
        **{name: target[name] for name in kept},
    }  # fmt: skip
    hidden, inner = target["hidden_size"], target["intermediate_size"]
    queries, keys = (
        target[heads] * target["head_dim"]
        for heads in ("num_attention_heads", "num_key_value_heads")
    )
    attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    shapes = {
        **{
            f"midlayer.self_attn.{name}.weight": (rows, 2 * hidden)
            for name, rows in attention.items()
        },
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "fc.weight": (hidden, 3 * hidden),
        "lm_head.weight": (target["vocab_size"], hidden),
    }
    norms = (
        "midlayer.hidden_norm",
        "midlayer.input_layernorm",
        "midlayer.post_attention_layernorm",
        "norm",
    )
    torch.manual_seed(7)
    tensors = {name: torch.randn(shape) * 0.05 for name, shape in shapes.items()}
    folder.mkdir()
    save_file(
        {**tensors, **{f"{name}.weight": torch.ones(hidden) for name in norms}},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Drafting:
    """A way to draft.

    Attributes:
        method: the engine's name of the way.
        option: the option as a row of docs/capabilities.json names it.
        flags: options of a server whose draft model is in a folder.
        draft: function that saves the draft model; None for a way without a model.
    """

    engine: str
    method: str
    option: str
    flags: Callable[[Path], tuple[str, ...]]
    draft: Callable[[Path], Path] | None = None
    layout: Layout = field(default_factory=Layout)

    def __str__(self) -> str:
        return f"{self.engine}-{self.method}-{self.layout}"


def copy_of_target(folder: Path) -> Path:
    return save(KIND, 1, folder)


def vllm(
    method: str, draft: Callable[[Path], Path] | None = None, *, tp: int = 1, **more: Any
) -> Drafting:
    def flags(folder: Path) -> tuple[str, ...]:
        model = {"model": str(folder)} if draft else {}
        told = {"method": method, "num_speculative_tokens": NUM_DRAFTS, **model, **more}
        return "--speculative-config", json.dumps(told)

    option = f"--speculative-config with method {method}"
    return Drafting("vllm", method, option, flags, draft, Layout(tp))


WAYS = [
    vllm("draft_model", copy_of_target),
    vllm("eagle3", eagle3),
    vllm("eagle3", eagle3, tp=2),
    vllm("ngram", prompt_lookup_min=1, prompt_lookup_max=3),
]


def frozen(server: Server) -> list[Mapping[str, str]]:
    """Return per rank a digest of every tensor of the draft model; without one, an empty mapping."""
    return list(server.post("/collective_rpc", {"method": "draft_digests"})["results"])


def changed(now: Sequence[Mapping[str, str]], before: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of tensors whose digests differ, of all ranks."""
    return sorted(
        name
        for one, other in zip(now, before, strict=True)
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    )


def answers(server: Server) -> list[tuple[list[int], list[float]]]:
    found = [server.sample(list(prompt), NUM_TOKENS) for prompt in PROMPTS]
    return [(sample.tokens, sample.logprobs) for sample in found]


LOGPROBS = """
import types
import torch
from sglang.srt.layers import sampler
from sglang.srt.speculative import eagle_worker_common
from windlass.engines.sglang.sampling import return_sampled_logprobs

return_sampled_logprobs()
return_sampled_logprobs()
compute = eagle_worker_common.compute_spec_logprobs
assert compute.__module__ == "sglang.srt.layers.logprob_processor"
torch.manual_seed(0)
REQUESTS = ((1.0, 1, 1.0), (0.7, 1, 1.0), (0.7, 5, 0.8), (1.3, 1 << 30, 0.5), (0.9, 3, 1.0), (1.0, 1 << 30, 1.0))
temperatures = torch.tensor([[t] for t, _, _ in REQUESTS])
sampling = types.SimpleNamespace(
    temperatures=temperatures, is_all_greedy=False, need_top_k_sampling=True, need_top_p_sampling=True,
    top_ks=torch.tensor([k for _, k, _ in REQUESTS], dtype=torch.int32),
    top_ps=torch.tensor([p for _, _, p in REQUESTS]),
)
batch = types.SimpleNamespace(
    seq_lens=[9] * len(REQUESTS), sampling_info=sampling, top_logprobs_nums=None, token_ids_logprobs=None
)
ACCEPTED, DRAFTED, WORDS = 3, 4, 11
logits = torch.randn(len(REQUESTS) * DRAFTED, WORDS) * 2
index = torch.tensor([[DRAFTED * r + place for place in (0, 2, 3)] for r in range(len(REQUESTS))])
wanted, predict = [], torch.zeros(len(logits), dtype=torch.int32)
for (temperature, top_k, top_p), rows in zip(REQUESTS, index.tolist()):
    for row in rows:
        probs = torch.softmax(logits[row].double() / temperature, -1)
        order = probs.argsort(descending=True)[:top_k].tolist()
        total, kept, before = float(probs[order].sum()), [], 0.0
        for token in order:
            if before > top_p:
                break
            kept.append(token)
            before += float(probs[token]) / total
        predict[row] = token = kept[-1]
        is_greedy = top_k == 1 and temperature == 1.0
        wanted.append(float((probs[token] / (1.0 if is_greedy else probs[kept].sum())).log()))
output = types.SimpleNamespace(next_token_logits=logits)
compute(batch, output, predict, accept_index=index)
assert output.next_token_logprobs.shape == index.shape
found = output.next_token_logprobs.reshape(-1).double()
assert torch.allclose(found, torch.tensor(wanted).double(), atol=1e-4), (found, wanted)
"""


def test_accepted_tokens_of_sglang_have_logprobs_of_the_sampled_distribution() -> None:
    """SGLang's own function is called in SGLang's environment, because SGLang accepts drafts on GPUs only."""
    source = str(Path(windlass.__file__).parents[1])
    done = subprocess.run(
        [str(VENVS["sglang"] / "bin/python"), "-c", LOGPROBS],
        check=False, capture_output=True, text=True, timeout=HTTP_S,
        env=environment("sglang", 1, source),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("way", WAYS, ids=str)
async def test_a_frozen_draft_changes_no_answer_after_an_update(
    way: Drafting, tmp_path: Path, shown: Record
) -> None:
    own, told = save(KIND, 1, tmp_path / "own"), list[tuple[list[int], list[float]]]()
    flags = way.flags(way.draft(tmp_path / "draft") if way.draft else tmp_path)
    with serving(
        way.engine, own, tmp_path / "live.log", layout=way.layout, flags=(*FLOAT32, *flags)
    ) as server:
        kept = frozen(server)
        drafts, taken = (
            Counter(server, f"spec_decode_num_{name}_tokens_total")
            for name in ("draft", "accepted")
        )
        assert all(map(bool, kept)) == (way.draft is not None)
        answers(server)
        count, accepted = drafts.since(), taken.since()
        if way.draft is copy_of_target:
            assert accepted == count > 0
        for version, mode in ((2, UpdateMode.IN_PLACE), (3, UpdateMode.STAGED)):
            model = build(KIND, version)
            model.save_pretrained(tmp_path / str(version))
            beside = await update_beside(
                server, model, version, mode, prompt=[3, 4, 5], num_tokens=64
            )
            spoken = beside.versions
            assert spoken == sorted(spoken)
            assert spoken[-1] in (-1, version - 1, version)
            assert server.digests() == server.digests_of_fresh_load(tmp_path / str(version))
            assert changed(frozen(server), kept) == []
            drafts.since(), taken.since()
            told = answers(server)
            count, accepted = drafts.since(), taken.since()
            assert 0 <= accepted <= count
            assert count > 0, "it must draft"
            if way.draft is copy_of_target:
                assert accepted < count / 2, "the draft must keep the first weights"
            sample = server.sample(list(PROMPTS[0]), NUM_TOKENS)
            assert sample.versions == [version] * NUM_TOKENS
    with serving_fresh(
        way.engine, tmp_path / "3", tmp_path / "fresh.log", layout=way.layout
    ) as fresh:
        said = [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [tokens for tokens, _ in told] == [tokens for tokens, _ in said]
    require_equal_answers(told, said)
    detail = (
        "the draft model stays frozen; answers equal those of a fresh server that drafts nothing"
    )
    shown(of_setting(way.engine, engine_version(way.engine), way.option, detail=detail))
