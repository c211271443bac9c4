"""Choice of the engine on live vLLM servers: prefix caches and load, against round robin.

Servers with prefix caches serve the rollouts of one controller. Groups of samples share a prompt, and the prompts of
one task share a long beginning, as a system prompt does. Each turn runs every rule of `windlass.rollout.Routing` with
prompts that no earlier run has used, so that caches hold nothing of them. The hit rate comes from the servers' metrics.

On a CPU, `make engines` makes the engine's environment. With `--device cuda`, the servers share the first GPU. They run
in this interpreter's environment, which needs vLLM:

    python benchmarks/bench_routing.py --device cuda --engines 4 --tasks 64 --shared 3584 --outstanding 256
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

import aiohttp
import torch
from live_engine.servers import ServerSettings, Vllm, start_server, tail
from live_engine.shapes import write_model_folder
from live_engine.surroundings import TOKEN
from transformers import AutoConfig, AutoModelForCausalLM

import windlass
from harness import Row, median_p95, parser, report
from windlass.net.access import Access, role_token
from windlass.net.addresses import free_port
from windlass.rollout import (
    RolloutConfig,
    RolloutController,
    Routing,
    SamplingParams,
    StalenessPolicy,
)

VOCABULARY = 240
RUN_S = 600.0
START_S = 400.0
FLAGS = (
    *("--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048"),
    "--enable-prefix-caching",
)


def prompts_of(run: int, num_tasks: int, num_prompts: int, num_shared: int) -> list[list[int]]:
    """Return prompts whose tokens no other run uses in the same places: `num_prompts` of each task."""
    made = []
    for question in range(num_prompts):
        for task in range(num_tasks):
            begin = [
                run % VOCABULARY,
                task,
                *((n * 7 + task) % VOCABULARY for n in range(num_shared)),
            ]
            made.append([*begin, *((question * 31 + n * 3) % VOCABULARY for n in range(32))])
    return made


def counts(urls: Sequence[str], token: str) -> tuple[float, float]:
    """Return the tokens that the servers looked up in their prefix caches, and those that they found."""
    headers = {"Authorization": f"Bearer {role_token(token, Access.CLIENT)}"}
    texts = []
    for url in urls:
        request = urllib.request.Request(f"{url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            texts.append(answer.read().decode())
    queries, hits = (
        sum(
            float(value)
            for text in texts
            for value in re.findall(
                rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.MULTILINE
            )
        )
        for name in ("queries", "hits")
    )
    return queries, hits


async def generate(
    controller: windlass.Controller,
    routing: Routing,
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
) -> tuple[float, int]:
    """Generate a group per prompt; return the seconds and the number of generated tokens."""
    sampling = SamplingParams(max_new_tokens=options.new_tokens, ignore_eos=True)
    config = RolloutConfig(routing=routing, affinity_slack=options.slack, max_attempts=1)
    policy = StalenessPolicy.unbounded(options.outstanding)
    async with RolloutController(
        controller.coordinator, policy, token=options.token, config=config
    ) as rollouts:
        rollouts.run_here({})
        began = time.perf_counter()
        handles = [rollouts.submit_group(prompt, options.samples, sampling) for prompt in prompts]
        await rollouts.next_batch(len(prompts), deadline_s=RUN_S)
        seconds = time.perf_counter() - began
        groups = [await handle for handle in handles]
    return seconds, sum(len(rollout.output_ids) for group in groups for rollout in group.rollouts)


def start_on_cpu(
    stack: ExitStack, controller: str, folder: Path, options: argparse.Namespace
) -> list[str]:
    """Start servers, let them join the controller, and publish weights; return their addresses."""
    # The GPU machine need not have the packages of the tests.
    from servers import Layout, save, serving

    model = save("long", 1, folder / "model")
    urls = []
    for number in range(options.engines):
        log = folder / f"{number}.log"
        server = stack.enter_context(
            serving(
                "vllm",
                model,
                log,
                layout=Layout(),
                flags=FLAGS,
                variables={"WINDLASS_TOKEN": TOKEN},
            )
        )
        server.join(controller, "cma", f"engine-{number}")
        urls.append(server.url)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with windlass.connect_trainer(module, controller=controller, token=options.token) as trainer:
        trainer.publish(1).result()
    return urls


async def end(process: asyncio.subprocess.Process) -> None:
    """End a server, if it has not ended yet, and wait for its end."""
    if process.returncode is None:
        process.terminate()
    await process.wait()


async def start_on_gpu(
    servers_end: AsyncExitStack, controller: str, folder: Path, options: argparse.Namespace
) -> list[str]:
    """Do the same as `start_on_cpu` on one GPU, with dummy weights until the first update."""
    write_model_folder("qwen3-0.6b", folder / "model")
    flags = (
        *("--max-model-len", "4096", "--max-num-batched-tokens", "8192"),
        *("--enable-prefix-caching", "--kv-cache-memory-bytes", str(options.cache_gib << 30)),
    )
    servers, processes = [], []
    async with aiohttp.ClientSession() as session:
        for number in range(options.engines):
            settings = ServerSettings(
                engine="vllm",
                port=free_port(),
                tp=1,
                transport="cuda_ipc",
                with_weights=False,
                streams=options.outstanding // options.engines + options.slack,
                engine_memory=0.9 / options.engines,
                cuda_graphs=True,
            )
            servers.append(Vllm(settings, session))
            log = folder / f"{number}.log"
            process = await start_server(
                *(servers[-1], str(folder / "model"), controller, log),
                ("--name", f"engine-{number}", *flags),
            )
            servers_end.push_async_callback(end, process)
            processes.append(process)
        for number, process in enumerate(processes):
            assert process.stdout is not None
            if not await asyncio.wait_for(process.stdout.readline(), START_S):
                raise SystemExit(f"server {number} ended:\n{tail(folder / f'{number}.log')}")
    config = AutoConfig.from_pretrained(folder / "model")
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def publish() -> None:
        with windlass.connect_trainer(
            module, controller=controller, token=options.token
        ) as trainer:
            trainer.publish(1).result()

    await asyncio.to_thread(publish)
    return [server.url for server in servers]


async def bench(options: argparse.Namespace, stack: ExitStack, folder: Path) -> list[Row]:
    """Measure every rule in every turn."""
    speeds: dict[Routing, list[float]] = {rule: [] for rule in Routing}
    rates: dict[Routing, list[float]] = {rule: [] for rule in Routing}
    staleness = StalenessPolicy.unbounded(1)
    async with (
        windlass.Controller(token=options.token, staleness=staleness) as controller,
        AsyncExitStack() as servers_end,
    ):
        if options.device == "cuda":
            urls = await start_on_gpu(servers_end, controller.url, folder, options)
        else:
            urls = await asyncio.to_thread(start_on_cpu, stack, controller.url, folder, options)
        # The first requests of a server are slower.
        first = prompts_of(VOCABULARY - 1, 2, 2 * options.engines, options.shared)
        await generate(controller, Routing.ROUND_ROBIN, first, options)
        run, rules = 0, list(Routing)
        for turn in range(options.turns):
            for rule in rules[turn % 3 :] + rules[: turn % 3]:
                prompts = prompts_of(run, options.tasks, options.prompts, options.shared)
                run += 1
                queries, hits = await asyncio.to_thread(counts, urls, options.token)
                seconds, num_tokens = await generate(controller, rule, prompts, options)
                more_queries, more_hits = await asyncio.to_thread(counts, urls, options.token)
                speeds[rule].append(num_tokens / seconds)
                rates[rule].append((more_hits - hits) / (more_queries - queries))
        await asyncio.to_thread(stack.close)
    if options.device == "cuda":
        version = importlib.metadata.version("vllm")
    else:
        from servers import engine_version

        version = engine_version("vllm")
    case = (
        f"vllm {version}, {options.engines} servers, {options.tasks} beginnings of {options.shared} tokens, "
        f"{options.prompts} prompts each, groups of {options.samples}, {options.outstanding} at a time"
    )
    reference, _ = median_p95(speeds[Routing.ROUND_ROBIN])
    rows = []
    for rule in Routing:
        speed, _ = median_p95(speeds[rule])
        rate, _ = median_p95(rates[rule])
        rows.append(Row(case, f"speed, {rule.value}", speed, "token/s", "round_robin", reference))
        rows.append(Row(case, f"prefix hit rate, {rule.value}", rate, "", "every token", 1.0))
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--turns", type=int, default=3, help="turns, each with every rule")
    arguments.add_argument("--tasks", type=int, default=6, help="beginnings of prompts")
    arguments.add_argument("--prompts", type=int, default=4, help="prompts of each task")
    arguments.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    arguments.add_argument("--shared", type=int, default=1024, help="tokens of a beginning")
    arguments.add_argument("--new-tokens", type=int, default=8, help="tokens of an answer")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--engines", type=int, default=2, help="number of servers")
    arguments.add_argument("--outstanding", type=int, default=16, help="running rollouts")
    arguments.add_argument("--slack", type=int, default=4, help="`RolloutConfig.affinity_slack`")
    arguments.add_argument(
        "--cache-gib", type=int, default=12, help="size of the cache of a server on a GPU"
    )
    options = arguments.parse_args()
    if options.device == "cuda":
        options.token = TOKEN
    else:
        import servers

        options.token = servers.TOKEN
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rows = asyncio.run(bench(options, stack, Path(folder)))
    report(rows, options.json, "Choice of the engine")


if __name__ == "__main__":
    main()
