"""`windlass audit FOLDER --version N`: the samples that a version was trained on, and a replay of one sample."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from windlass.cli import Command
from windlass.envs import ENGINE_TOKEN_VARIABLE, TOKEN_VARIABLE, secret_value
from windlass.errors import ConfigError
from windlass.jobs.audit import AUDIT, AuditedVersion, read_audit
from windlass.jobs.replay import Replay, replay
from windlass.net.access import Access, role_token
from windlass.net.addresses import check_url
from windlass.net.sockets import open_http
from windlass.rollout.messages import TrainingSample
from windlass.rollout.text import TextCodec, load_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `windlass audit`."""
    parser.add_argument("folder", type=Path, help="output folder of a job with `audit = true`")
    parser.add_argument("--version", type=int, required=True, help="trained version")
    parser.add_argument(
        "--sample", type=int, metavar="NUMBER", help="only this sample, with its tokens"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.add_argument(
        "--replay",
        metavar="URL",
        help="generate the sample again on the engine at URL and compare; exit status 1 if tokens differ. "
        "The token of the engine comes from WINDLASS_TOKEN or WINDLASS_ENGINE_TOKEN",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="NATS",
        help="with --replay, exit status 1 if a log-probability differs by more (default 0.001; 0 for bit for bit)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the record of a version or of one sample, or replay the sample; return the exit status.

    Raises:
        ConfigError: the sample does not exist, `--replay` is given without `--sample`, or the URL of `--replay` is
            invalid; see also `read_audit` and `replay`.
        AttemptError: see `replay`.
    """
    audited = read_audit(args.folder / AUDIT, args.version)
    samples = audited.samples
    if args.sample is not None and not 0 <= args.sample < len(samples):
        raise ConfigError(f"audit: --sample must be in [0, {len(samples)}), got {args.sample}")
    if args.replay is not None:
        if args.sample is None:
            raise ConfigError("audit: --sample must be given with --replay, got none")
        check_url(args.replay, "audit: --replay")
        found = asyncio.run(_replay(args.replay, args.sample, audited))
        print(f"sample {args.sample} of version {args.version}: {found.text()}")
        return 0 if found.agrees(args.tolerance) else 1
    if args.json:
        chosen = samples if args.sample is None else samples[args.sample : args.sample + 1]
        seeds = audited.seeds if args.sample is None else (audited.seeds[args.sample],)
        shown = msgspec.structs.replace(audited, samples=chosen, seeds=seeds)
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown)).decode() + "\n")
        return 0
    print(_head(audited))
    for number, sample in enumerate(samples):
        if args.sample in {None, number}:
            print(_line(number, sample, audited.seeds[number]))
    if args.sample is not None:
        print(_tokens(samples[args.sample], _tokenizer_of(audited)))
    return 0


def _tokenizer_of(audited: AuditedVersion) -> TextCodec | None:
    """Return the job's tokenizer; None if the job had none. If loading it fails, print the error and return None."""
    if not audited.tokenizer:
        return None
    try:
        return load_text(audited.tokenizer)
    except ConfigError as error:
        print(f"audit: the tokens are shown without their text: {error}", file=sys.stderr)
        return None


async def _replay(url: str, number: int, audited: AuditedVersion) -> Replay:
    owner = secret_value(TOKEN_VARIABLE)
    token = secret_value(ENGINE_TOKEN_VARIABLE) or (
        role_token(owner, Access.CLIENT) if owner else ""
    )
    async with open_http(token, to_controller=False, many_connections=True) as http:
        return await replay(
            http, url.rstrip("/"), audited.samples[number], audited.sampling, audited.seeds[number]
        )


def _head(audited: AuditedVersion) -> str:
    when = datetime.fromtimestamp(audited.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    state = "published" if audited.is_published else "not published"
    sampling = msgspec.json.encode(audited.sampling).decode()
    return (
        f"version {audited.version}, {state}: step {audited.step}, {when}, {len(audited.samples)} samples, "
        f"sampling {sampling}"
    )


def _line(number: int, sample: TrainingSample, seed: int | None) -> str:
    """Return one line about a sample: its origin, its reward, and its number of tokens per version."""
    seeded = "" if seed is None else f"  seed {seed}"
    counts = Counter(version for version in sample.versions if version >= 0)
    versions = ", ".join(
        f"{count} of version {version}" for version, count in sorted(counts.items())
    )
    return (
        f"{number:>5}  group {sample.group_id}  rollout {sample.task_id or '-'}  engine {sample.engine}{seeded}  "
        f"reward {sample.reward:g}  prompt {len(sample.prompt_ids)} tokens, output {len(sample.output_ids)}: {versions}"
    )


def _tokens(sample: TrainingSample, tokenizer: TextCodec | None) -> str:
    """Return the prompt, and one line per output token.

    With a tokenizer, also return the text of the prompt, of the output, and of each token. Special tokens have no text.
    """
    rows = zip(sample.output_ids, sample.logprobs, sample.versions, sample.loss_mask, strict=True)
    lines = [
        f"{token:>7}  {logprob:.6g}  {version if version >= 0 else '-'}  {'yes' if used else 'no'}"
        for token, logprob, version, used in rows
    ]
    head, prompt = "  token  logprob  version  trained", " ".join(map(str, sample.prompt_ids))
    if tokenizer is None:
        return "\n".join((f"prompt {prompt}", head, *lines))
    texts = [repr(tokenizer.decode([token])) for token in sample.output_ids]
    return "\n".join(
        (
            f"prompt {prompt}",
            f"prompt text {tokenizer.decode(sample.prompt_ids)!r}",
            f"output text {tokenizer.decode(sample.output_ids)!r}",
            f"{head}  text",
            *(f"{line}  {text}" for line, text in zip(lines, texts, strict=True)),
        )
    )


COMMAND = Command("the samples that a version of a job was trained on", add_arguments, run)
