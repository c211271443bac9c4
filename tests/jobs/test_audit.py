"""The record of trained samples: its content after real jobs, and replays on a live engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from demo_checkpoint import write_checkpoint
from small_job import EXAMPLE, launch, write_job

from windlass.errors import ConfigError
from windlass.jobs.audit import AUDIT, AuditRecord, read_audit
from windlass.jobs.replay import Replay, replay
from windlass.net.access import Access, role_token
from windlass.net.sockets import open_http
from windlass.rollout import SamplingParams, TrainingSample
from windlass.rollout.generate import generate
from windlass.rollout.messages import EngineTarget, RolloutTask
from windlass.rollout.text import load_text

TOKEN = "secret of the test"
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=6, ignore_eos=True)


def sample(number: int, version: int) -> TrainingSample:
    return TrainingSample(
        prompt_ids=(1, 2, number),
        output_ids=(number + 1, number + 2, number + 3),
        logprobs=(-0.1 * number, -0.25, 0.0),
        versions=(version, version + 1, -1),
        loss_mask=(True, True, False),
        reward=number / 4,
        group_id=number // 2,
        engine="engine-a",
        task_id=f"task-{number}",
        metadata={"row": number},
    )


def audit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "windlass.cli.main", "audit", str(folder), *arguments),
        env={**os.environ, "WINDLASS_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_record_has_the_samples_of_each_version_and_replaces_a_repeated_step(
    tmp_path: Path,
) -> None:
    record = AuditRecord(tmp_path / AUDIT, SAMPLED)
    record.add(4, 3, [sample(0, 2)], {})
    record.add(4, 3, [sample(number, 2) for number in range(3)], {"task-1": 101})
    record.note_published(4)
    record.add(5, 4, [sample(7, 3)], {})
    first, second = (read_audit(tmp_path / AUDIT, version) for version in (4, 5))
    assert first.samples == tuple(sample(number, 2) for number in range(3))
    assert first.seeds == (None, 101, None)
    assert (first.step, first.sampling, first.is_published) == (3, SAMPLED, True)
    assert (second.samples, second.is_published) == ((sample(7, 3),), False)
    with pytest.raises(ConfigError, match=r"must be a trained version in .* \(4 to 5\), got 6"):
        read_audit(tmp_path / AUDIT, 6)
    with pytest.raises(ConfigError, match=r"does not exist; set `audit = true`"):
        read_audit(tmp_path / "nowhere", 6)
    (tmp_path / "broken").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="broken cannot be read: file is not a database"):
        read_audit(tmp_path / "broken", 6)


def test_command_shows_versions_rewards_and_tokens(tmp_path: Path) -> None:
    AuditRecord(tmp_path / AUDIT, SAMPLED).add(4, 3, [sample(0, 2), sample(5, 2)], {"task-5": 7})
    shown = audit(tmp_path, "--version", "4")
    assert shown.stdout.startswith("version 4, not published: step 3, ")
    assert shown.stdout.splitlines()[2].strip() == (
        "1  group 2  rollout task-5  engine engine-a  seed 7  reward 1.25  prompt 3 tokens, "
        "output 3: 1 of version 2, 1 of version 3"
    )
    shown = audit(tmp_path, "--version", "4", "--sample", "1")
    assert shown.stdout.splitlines()[2:] == [
        "prompt 1 2 5",
        "  token  logprob  version  trained",
        "      6  -0.5  2  yes",
        "      7  -0.25  3  yes",
        "      8  0  -  no",
    ]
    found = json.loads(audit(tmp_path, "--version", "4", "--json").stdout)
    assert [each["reward"] for each in found["samples"]] == [0.0, 1.25]
    refused = audit(tmp_path, "--version", "4", "--sample", "2")
    assert (refused.returncode, "--sample must be in [0, 2), got 2" in refused.stderr) == (2, True)


def test_command_shows_the_text_of_tokens_if_the_job_has_a_tokenizer(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tokenizer")
    text = load_text(str(folder))
    answer = text.encode("7 + 4")
    made = msgspec.structs.replace(
        sample(1, 2),
        prompt_ids=text.encode("3 + 4"),
        output_ids=answer,
        logprobs=(-0.5,) * len(answer),
        versions=(2,) * len(answer),
        loss_mask=(True,) * len(answer),
    )
    AuditRecord(tmp_path / AUDIT, SAMPLED, str(folder)).add(4, 3, [made], {})
    shown = audit(tmp_path, "--version", "4", "--sample", "0").stdout.splitlines()[2:]
    assert shown[1:4] == [
        "prompt text '3 + 4'",
        "output text '7 + 4'",
        "  token  logprob  version  trained  text",
    ]
    assert shown[4:] == [f"{token:>7}  -0.5  2  yes  {text.decode([token])!r}" for token in answer]
    shutil.rmtree(folder)
    without = audit(tmp_path, "--version", "4", "--sample", "0")
    assert without.stdout.splitlines()[3] == "  token  logprob  version  trained"
    assert "the tokens are shown without their text: tokenizer: must be" in without.stderr
    # Files of older releases have no such table.
    with contextlib.closing(sqlite3.connect(tmp_path / AUDIT)) as connection, connection:
        connection.execute("DROP TABLE tokenizers")
    assert read_audit(tmp_path / AUDIT, 4).tokenizer == ""


def test_job_records_every_sample_that_it_trained_on(tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        """
        from pathlib import Path
        from windlass.jobs import Recipe, Task

        class R(Recipe):
            def tasks(self):
                for number in range(100):
                    yield Task(prompt_ids=(1, number % 60))

            def rewards(self, group):
                return [rollout.output_ids.count(7) + n / 8 for n, rollout in enumerate(group.rollouts)]

            async def before_step(self, step, samples):
                file = Path(__file__).with_name(f"step-{step}")
                file.write_text(repr([(s.task_id, s.output_ids, s.reward) for s in samples]))
        """,
        top="steps = 3\naudit = true",
    )
    job.write_text(job.read_text().replace("sampling = {", "sampling = { sampling_seed = 40,"))
    status, printed = launch(job)
    assert status == 0, printed
    for step in range(3):
        found = read_audit(tmp_path / "out" / AUDIT, step + 1)
        trained = [(s.task_id, s.output_ids, s.reward) for s in found.samples]
        assert (tmp_path / f"step-{step}").read_text() == repr(trained)
        assert len(trained) == 4
        assert Counter(found.seeds) == {40: 2, 41: 2}
        assert found.is_published
        assert found.step == step + 1
        assert {version for s in found.samples for version in s.versions} <= {step - 1, step}
    assert audit(tmp_path / "out", "--version", "3").stdout.count("engine engine-a") == 4


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    command = (sys.executable, "-m", "windlass.engines.embedded", "--name", "engine")
    process = subprocess.Popen(
        (*command, "--model", str(EXAMPLE / "model.json"), "--max-positions", "64"),
        env={**os.environ, "WINDLASS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.communicate()


def generated(
    url: str, sampling: SamplingParams, *, num_turns: int = 2
) -> tuple[TrainingSample, Replay]:
    """Let the engine generate a conversation; return the sample and its replay."""

    async def run() -> tuple[TrainingSample, Replay]:
        async with open_http(role_token(TOKEN, Access.CLIENT), to_controller=False) as http:
            output: tuple[int, ...] = ()
            logprobs: tuple[float, ...] = ()
            versions: tuple[int, ...] = ()
            mask: tuple[bool, ...] = ()
            for turn in range(num_turns):
                task = RolloutTask(
                    task_id=f"turn-{turn}",
                    attempt=1,
                    prompt_ids=(5, 9, 3, *output),
                    sampling=sampling,
                    engine=EngineTarget("engine", url),
                    deadline_s=60.0,
                )
                answer = (await generate(http, task)).tokens
                # One token of a tool follows each answer.
                output += (*answer.output_ids, 11)
                logprobs += (*answer.logprobs, 0.0)
                versions += (*answer.versions, -1)
                mask += (*([True] * len(answer.versions)), False)
            made = TrainingSample(
                prompt_ids=(5, 9, 3),
                output_ids=output,
                logprobs=logprobs,
                versions=versions,
                loss_mask=mask,
                reward=1.0,
                group_id=0,
                engine="engine",
            )
            return made, await replay(http, url, made, sampling, sampling.sampling_seed)

    return asyncio.run(run())


def test_greedy_sample_is_replayed_bit_for_bit(engine: str, tmp_path: Path) -> None:
    made, found = generated(engine, GREEDY)
    assert found.is_identical
    assert (found.num_compared, found.num_other_version) == (12, 0)
    logprobs = (*made.logprobs[:2], made.logprobs[2] + 1e-12, *made.logprobs[3:])
    wrong = (*made.output_ids[:9], made.output_ids[9] ^ 1, *made.output_ids[10:])
    samples = [
        made,
        msgspec.structs.replace(made, logprobs=logprobs),
        msgspec.structs.replace(made, output_ids=wrong),
        msgspec.structs.replace(made, versions=tuple(3 if used else -1 for used in made.loss_mask)),
    ]
    AuditRecord(tmp_path / AUDIT, GREEDY).add(1, 1, samples, {})
    exactly = ("--replay", engine, "--tolerance", "0")
    said = [
        audit(tmp_path, "--version", "1", "--sample", str(number), *exactly) for number in range(4)
    ]
    assert [each.returncode for each in said] == [0, 1, 1, 0], said
    assert said[0].stdout == (
        "sample 0 of version 1: the engine generated the same 12 tokens with the same log-probabilities\n"
    )
    assert (
        "12 of 12 tokens compared; their log-probabilities differ by at most 1e-12"
        in said[1].stdout
    )
    assert "the tokens first differ at output_ids[9]" in said[2].stdout
    assert "the sample has 12 tokens of other versions" in said[3].stdout
    tolerant = audit(tmp_path, "--version", "1", "--sample", "1", "--replay", engine)
    assert tolerant.returncode == 0


def test_sampled_sample_is_compared_where_it_has_the_most_probable_token(engine: str) -> None:
    # With a random model few sampled tokens are the most probable ones, so compare a greedy sample.
    made, _ = generated(engine, GREEDY)

    async def run(sampling: SamplingParams, compared: TrainingSample) -> Replay:
        async with open_http(role_token(TOKEN, Access.CLIENT), to_controller=False) as http:
            return await replay(http, engine, compared, sampling)

    found = asyncio.run(run(SAMPLED, made))
    assert (found.num_generated, found.num_compared, found.is_exact) == (12, 12, False)
    assert found.largest_distance < 1e-5
    shifted = tuple(each + 0.5 for each in made.logprobs)
    found = asyncio.run(run(SAMPLED, msgspec.structs.replace(made, logprobs=shifted)))
    assert abs(found.mean_distance - 0.5) < 1e-5
    _, found = generated(engine, SAMPLED)
    assert 0 <= found.num_compared <= found.num_generated == 12
    assert found.largest_distance < 1e-5
    with pytest.raises(
        ConfigError, match=r"temperature must be 1\.0 unless the sampling is greedy or seeded, got"
    ):
        asyncio.run(run(msgspec.structs.replace(SAMPLED, temperature=0.5), made))


def test_sampled_sample_is_compared_with_the_end_tokens_that_its_answer_had(engine: str) -> None:
    """Before `min_new_tokens`, stop tokens have no probability, and the other tokens have more. Half of all are stop tokens."""
    ends = {"min_new_tokens": 3, "stop_token_ids": tuple(range(0, 64, 2)), "ignore_eos": False}
    greedy, sampled = (msgspec.structs.replace(each, **ends) for each in (GREEDY, SAMPLED))
    made, _ = generated(engine, greedy)

    async def run(sampling: SamplingParams) -> Replay:
        async with open_http(role_token(TOKEN, Access.CLIENT), to_controller=False) as http:
            return await replay(http, engine, made, sampling)

    found = asyncio.run(run(sampled))
    assert found.num_compared == found.num_generated >= 6
    assert found.largest_distance < 1e-5
    with pytest.raises(ConfigError, match=r"regex must be '' unless the sampling is greedy"):
        asyncio.run(run(msgspec.structs.replace(SAMPLED, regex="a+")))


def test_sample_with_a_seed_is_generated_again(engine: str) -> None:
    seeded = msgspec.structs.replace(SAMPLED, sampling_seed=12345, temperature=0.7, top_p=0.9)
    made, found = generated(engine, seeded, num_turns=1)
    assert found.is_identical
    assert found.num_compared == 6
    other, _ = generated(engine, msgspec.structs.replace(seeded, sampling_seed=54321), num_turns=1)
    assert made.output_ids != other.output_ids
