"""Choice of the engine on live vLLM servers on CPU: prefix caches and load, against round robin.

Two servers with prefix caches serve the rollouts of one controller. Groups of samples share a prompt, and the prompts of
one task share a long beginning, as a system prompt does. Each turn runs every rule of `windlass.rollout.Routing` with
prompts that no earlier run has used, so that caches hold nothing of them. The hit rate comes from the servers' metrics.
`make engines` makes the engine's environment.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from servers import TOKEN, Layout, engine_version, save, serving
from transformers import AutoModelForCausalLM

import windlass
from harness import Row, median_p95, parser, report
from windlass.net.access import Access, role_token
from windlass.rollout import (
    RolloutConfig,
    RolloutController,
    Routing,
    SamplingParams,
    StalenessPolicy,
)

VOCABULARY = 240
RUN_S = 600.0
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


def counts(urls: Sequence[str]) -> tuple[float, float]:
    """Return the tokens that the servers looked up in their prefix caches, and those that they found."""
    headers = {"Authorization": f"Bearer {role_token(TOKEN, Access.CLIENT)}"}
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
    samples: int,
) -> tuple[float, int]:
    """Generate a group per prompt; return the seconds and the number of generated tokens."""
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    config = RolloutConfig(routing=routing, affinity_slack=4, max_attempts=1)
    policy = StalenessPolicy.unbounded(16)
    async with RolloutController(
        controller.coordinator, policy, token=TOKEN, config=config
    ) as rollouts:
        rollouts.run_here({})
        began = time.perf_counter()
        handles = [rollouts.submit_group(prompt, samples, sampling) for prompt in prompts]
        await rollouts.next_batch(len(prompts), deadline_s=RUN_S)
        seconds = time.perf_counter() - began
        groups = [await handle for handle in handles]
    return seconds, sum(len(rollout.output_ids) for group in groups for rollout in group.rollouts)


def start_servers(stack: ExitStack, controller: str, folder: Path) -> list[str]:
    """Start two servers, let them join the controller, and publish weights; return their addresses."""
    model = save("long", 1, folder / "model")
    urls = []
    for number in range(2):
        log = folder / f"{number}.log"
        server = stack.enter_context(serving("vllm", model, log, layout=Layout(), flags=FLAGS))
        server.join(controller, "cma", f"engine-{number}")
        urls.append(server.url)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with windlass.connect_trainer(module, controller=controller, token=TOKEN) as trainer:
        trainer.publish(1).result()
    return urls


async def bench(options: argparse.Namespace, stack: ExitStack, folder: Path) -> list[Row]:
    """Measure every rule in every turn."""
    speeds: dict[Routing, list[float]] = {rule: [] for rule in Routing}
    rates: dict[Routing, list[float]] = {rule: [] for rule in Routing}
    staleness = StalenessPolicy.unbounded(1)
    async with windlass.Controller(token=TOKEN, staleness=staleness) as controller:
        urls = await asyncio.to_thread(start_servers, stack, controller.url, folder)
        # The first requests of a server are slower.
        first = prompts_of(VOCABULARY - 1, 2, 1, options.shared)
        await generate(controller, Routing.ROUND_ROBIN, first, 2)
        run, rules = 0, list(Routing)
        for turn in range(options.turns):
            for rule in rules[turn % 3 :] + rules[: turn % 3]:
                prompts = prompts_of(run, options.tasks, options.prompts, options.shared)
                run += 1
                queries, hits = await asyncio.to_thread(counts, urls)
                seconds, num_tokens = await generate(controller, rule, prompts, options.samples)
                more_queries, more_hits = await asyncio.to_thread(counts, urls)
                speeds[rule].append(num_tokens / seconds)
                rates[rule].append((more_hits - hits) / (more_queries - queries))
        await asyncio.to_thread(stack.close)
    case = (
        f"vllm {engine_version('vllm')}, 2 servers, {options.tasks} beginnings of {options.shared} tokens, "
        f"{options.prompts} prompts each, groups of {options.samples}"
    )
    rows = []
    for name, unit, found in (("speed", "token/s", speeds), ("prefix hit rate", "", rates)):
        reference, _ = median_p95(found[Routing.ROUND_ROBIN])
        for rule in (Routing.PREFIX, Routing.LEAST_LOADED):
            value, _ = median_p95(found[rule])
            rows.append(Row(case, f"{name}, {rule.value}", value, unit, "round_robin", reference))
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--turns", type=int, default=3, help="turns, each with every rule")
    arguments.add_argument("--tasks", type=int, default=6, help="beginnings of prompts")
    arguments.add_argument("--prompts", type=int, default=4, help="prompts of each task")
    arguments.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    arguments.add_argument("--shared", type=int, default=1024, help="tokens of a beginning")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rows = asyncio.run(bench(options, stack, Path(folder)))
    report(rows, options.json, "Choice of the engine")


if __name__ == "__main__":
    main()
