"""Engine calls become trajectories: each generated token is trained exactly once, with its logprob and version."""

from __future__ import annotations

from collections import Counter
from itertools import count

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from windlass.rollout.messages import Partial, Turn
from windlass.rollout.trajectories import Trajectory, increments, merge_turns, whole_turns

Tokens = tuple[int, ...]


def turn(prompt: Tokens, output: Tokens, first: int, reason: str = "stop") -> Turn:
    """Return a turn whose tokens have distinct logprobs and versions, counted from `first`."""
    numbers = range(first, first + len(output))
    return Turn(prompt, Partial(output, tuple(-0.5 - n for n in numbers), tuple(numbers)), reason)


@st.composite
def dialogues(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Draw calls that continue an earlier state or start again, with so few tokens that prefixes are often equal."""
    tokens = st.lists(st.integers(0, 1), max_size=3).map(tuple)
    states: list[Tokens] = [()]
    numbers, turns = count(), []
    for _ in range(draw(st.integers(0, 9))):
        prompt = draw(st.sampled_from(states)) + draw(tokens)
        output = draw(tokens)
        first = next(numbers)
        for _ in output[1:]:
            next(numbers)
        turns.append(turn(prompt, output, first))
        states.append(prompt + output)
    return tuple(turns)


def trained(found: Trajectory) -> list[tuple[int, float, int]]:
    """Return the trained tokens of a trajectory with their logprobs and versions."""
    columns = zip(found.output_ids, found.logprobs, found.versions, found.loss_mask, strict=True)
    return [(token, logprob, version) for token, logprob, version, used in columns if used]


@given(dialogues())
def test_every_generated_token_is_trained_once_with_its_logprob_and_version(
    turns: tuple[Turn, ...],
) -> None:
    generated = Counter(
        token
        for each in turns
        for token in zip(
            each.output.output_ids, each.output.logprobs, each.output.versions, strict=True
        )
    )
    found = merge_turns(turns)
    assert Counter(token for each in found for token in trained(each)) == generated
    for each in found:
        # Versions count the generated tokens, so they tell the order.
        versions = [version for _, _, version in trained(each)]
        assert versions == sorted(versions)
        for logprob, version, used in zip(
            each.logprobs, each.versions, each.loss_mask, strict=True
        ):
            assert used or (logprob, version) == (0.0, -1)


@given(dialogues())
def test_each_call_is_found_whole_behind_its_own_prompt(turns: tuple[Turn, ...]) -> None:
    found = merge_turns(turns)
    for each in turns:
        if not each.output.output_ids:
            continue
        (home,) = (t for t in found if each.output.versions[0] in t.versions)
        begin = len(home.prompt_ids) + home.versions.index(each.output.versions[0])
        end = begin + len(each.output.output_ids)
        complete = home.prompt_ids + home.output_ids
        assert complete[:begin] == each.prompt_ids
        assert complete[begin:end] == each.output.output_ids


@given(dialogues())
def test_a_branch_names_the_trajectory_that_shares_its_longest_prefix(
    turns: tuple[Turn, ...],
) -> None:
    found = merge_turns(turns)
    for index, each in enumerate(found):
        assert each.parent < index
        assert (each.parent == -1) == (each.num_shared == 0)
        if each.parent >= 0:
            parent = found[each.parent]
            complete = parent.prompt_ids + parent.output_ids
            assert complete[: each.num_shared] == each.prompt_ids[: each.num_shared]


def test_turns_with_inserted_tokens_are_one_trajectory_and_other_prompts_are_branches() -> None:
    system, question = (1, 2), (3,)
    first = turn(system + question, (10, 11), 0)
    # The answer of a tool, 20 and 21, comes between the calls.
    second = turn((*system, *question, 10, 11, 20, 21), (12,), 2, "length")
    # A second conversation with the same system prompt, and a retry of the first call.
    other = turn((*system, 4), (13,), 3)
    retry = turn(system + question, (10, 14), 4)
    silent = Turn(system, Partial(), "abort")
    found = merge_turns([first, other, silent, second, retry])
    assert found == (
        Trajectory(
            prompt_ids=(1, 2, 3),
            output_ids=(10, 11, 20, 21, 12),
            logprobs=(-0.5, -1.5, 0.0, 0.0, -2.5),
            versions=(0, 1, -1, -1, 2),
            loss_mask=(True, True, False, False, True),
            finish_reason="length",
        ),
        Trajectory((1, 2, 4), (13,), (-3.5,), (3,), (True,), "stop", parent=0, num_shared=2),
        Trajectory(
            (1, 2, 3), (10, 14), (-4.5, -5.5), (4, 5), (True, True), "stop", parent=0, num_shared=3
        ),
    )


def test_a_call_continues_the_longest_of_several_trajectories() -> None:
    short, long = turn((1,), (2,), 0), turn((1, 2, 3), (4,), 1)
    again = turn((1,), (2,), 2)
    # `long` continues `short`. The repeated call starts a new trajectory, which the last call continues.
    last = turn((1, 2), (9,), 3)
    found = merge_turns([short, long, again, last])
    assert [each.output_ids for each in found] == [(2, 3, 4), (2, 9)]


@given(dialogues())
def test_increments_give_the_whole_turns_again(turns: tuple[Turn, ...]) -> None:
    found = increments(turns)
    assert whole_turns(found) == turns
    known = 0
    for index, (each, whole) in enumerate(zip(found, turns, strict=True)):
        # A turn that continues the turn before it has only its new tokens.
        if index and whole.prompt_ids[:known] == complete(turns[index - 1]):
            assert len(each.prompt_ids) <= len(whole.prompt_ids) - known
        known = len(complete(whole))


def complete(turn: Turn) -> Tokens:
    return turn.prompt_ids + turn.output.output_ids


def conversation(num_turns: int) -> tuple[Turn, ...]:
    """Return turns of 40 generated tokens, each after 60 new tokens."""
    turns, prompt, numbers = [], tuple[int, ...](), count(1000)
    for _ in range(num_turns):
        prompt += tuple(next(numbers) for _ in range(60))
        output = tuple(next(numbers) for _ in range(40))
        turns.append(turn(prompt, output, 3))
        prompt += output
    return tuple(turns)


def test_the_size_of_a_conversation_grows_with_its_tokens() -> None:
    """Without increments, 100 turns take 3.4 times the bytes of 50 turns."""
    sizes = {n: len(msgspec.msgpack.encode(increments(conversation(n)))) for n in (50, 100)}
    whole = len(msgspec.msgpack.encode(conversation(50)))
    assert sizes[100] < 2.1 * sizes[50]
    assert sizes[50] < whole / 5
