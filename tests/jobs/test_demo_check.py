"""The demo's check finds exactly the answers that other weights than the named version generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from windlass.jobs import demo
from windlass.jobs.demo.checker import TornReport, check_served
from windlass.jobs.demo.trainer import build_model
from windlass.rollout.messages import TrainingSample

MODEL = Path(demo.__file__).parent / "model.json"
PROMPT, NUM_VERSIONS = (10, 3, 7, 12), 3


@pytest.fixture(scope="module")
def versions_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    for version in range(NUM_VERSIONS):
        torch.manual_seed(version)
        # With large weights, a single token shows its version and the version of its context.
        weights = {n: 4 * p.detach() for n, p in build_model(MODEL).named_parameters()}
        save_file(weights, folder / f"{version}.safetensors")
    return folder


@torch.no_grad()
def serve(folder: Path, versions: Sequence[int], *, kept: bool) -> TrainingSample:
    """Draw an answer token by token, as an engine does; with `kept`, keys and values of older versions stay."""
    models = {version: build_model(MODEL).eval() for version in versions}
    for version, model in models.items():
        model.load_state_dict(load_file(folder / f"{version}.safetensors"), strict=False)
    tokens, logprobs, cache = [*PROMPT], list[float](), DynamicCache()
    for before, version in zip((versions[0], *versions), versions, strict=False):
        if version != before and not kept:
            cache = DynamicCache()
        fed = torch.tensor([tokens[cache.get_seq_length() :]])
        chances = models[version](fed, None, None, cache).logits[0, -1].log_softmax(-1)
        token = int(chances.topk(2).indices[len(tokens) % 2])
        tokens.append(token)
        logprobs.append(float(chances[token]))
    return TrainingSample(
        prompt_ids=PROMPT,
        output_ids=tuple(tokens[len(PROMPT) :]),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        engine="e",
        reward=0.0,
        group_id=0,
    )


def check(
    folder: Path, *samples: TrainingSample, kept: bool, published: int = NUM_VERSIONS
) -> TornReport:
    return check_served(
        samples,
        range(published),
        model_config=MODEL,
        versions_dir=folder,
        dtypes={"e": "float32"},
        context_is_kept=kept,
        device="cpu",
    )


ACROSS = [(0, 0, 0, 1, 1, 1, 1, 1), (1, 2, 2, 2, 2, 2, 2, 2), (0, 0, 1, 1, 1, 1, 2, 2)]
WITHIN = [(0,) * 8, (2,) * 8]


@pytest.mark.parametrize("kept", [False, True])
def test_answers_fit_the_versions_that_their_tokens_name(versions_dir: Path, kept: bool) -> None:
    samples = [serve(versions_dir, versions, kept=kept) for versions in ACROSS + WITHIN]
    found = check(versions_dir, *samples, kept=kept)
    assert (found.checked, found.torn) == (5, 0)
    assert found.control_detected == 1.0


def test_a_kept_answer_counts_as_torn_where_answers_may_not_be_kept(versions_dir: Path) -> None:
    samples = [serve(versions_dir, versions, kept=True) for versions in ACROSS]
    assert check(versions_dir, *samples, kept=False).torn == 3


def test_an_answer_requested_again_passes_where_answers_may_be_kept(versions_dir: Path) -> None:
    samples = [serve(versions_dir, versions, kept=False) for versions in ACROSS]
    assert check(versions_dir, *samples, kept=True).torn == 0


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("at", range(8))
def test_one_token_of_another_version_is_found(versions_dir: Path, kept: bool, at: int) -> None:
    true = serve(versions_dir, (1,) * 8, kept=kept)
    named = tuple(2 if i >= at else 1 for i in range(8))
    forged = msgspec.structs.replace(true, versions=named)
    found = check(versions_dir, forged, kept=kept)
    assert found.torn == 1
    (worst,) = found.worst
    assert worst.sample == forged
    assert worst.expected["version 1"] == pytest.approx(true.logprobs, abs=1e-4), "what made it"
    assert worst.expected["as named"] != pytest.approx(true.logprobs, abs=1e-3)


def test_a_version_that_was_never_published_is_torn(versions_dir: Path) -> None:
    sample = serve(versions_dir, (2,) * 8, kept=False)
    assert check(versions_dir, sample, kept=False, published=2).torn == 1


def test_the_last_version_needs_no_copy(versions_dir: Path) -> None:
    """Trainers save a version when they train on its answers, and they train on no answer of the last version."""
    sample = serve(versions_dir, (2,) * 8, kept=False)
    found = check(versions_dir, sample, kept=False, published=NUM_VERSIONS + 1)
    assert found.torn == 0
    assert {"version 1", "version 2"} < found.worst[0].expected.keys()


@pytest.mark.parametrize("kept", [False, True])
def test_the_check_reports_its_progress(versions_dir: Path, kept: bool) -> None:
    samples = [serve(versions_dir, versions, kept=kept) for versions in ACROSS + WITHIN]
    done: list[int] = []
    check_served(
        samples,
        range(1, NUM_VERSIONS),
        model_config=MODEL,
        versions_dir=versions_dir,
        dtypes={"e": "float32"},
        context_is_kept=kept,
        device="cpu",
        progress=done.append,
    )
    # Three answers name version 0, which was not published. They need no forward pass.
    assert done == [3, 4, 5]
