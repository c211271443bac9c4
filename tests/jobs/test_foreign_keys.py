"""Names of TRL and verl in a job's file, and the table of the losses' defaults in the documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from windlass.jobs.config import LaunchConfig, read_job
from windlass.jobs.foreign_keys import REASONS, TRANSFORMERS, TRL, VERL, VLLM, translated
from windlass.jobs.training import TrainingSection
from windlass.sampling import SamplingParams
from windlass.training.settings import LOSSES, LossConfig

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "arithmetic" / "arithmetic.toml"


def keys_of(kind: inspect.Type, where: str = "") -> set[str]:
    """Return the dotted names of all settings of a job."""
    match kind:
        case inspect.StructType(fields=fields):
            found = {f"{where}{field.encode_name}" for field in fields}
            return found.union(
                *(keys_of(field.type, f"{where}{field.encode_name}.") for field in fields)
            )
        case inspect.VarTupleType(item_type=item):
            return keys_of(item, where)
        case inspect.UnionType(types=kinds):
            return {name for each in kinds for name in keys_of(each, where)}
        case _:
            return set()


@pytest.mark.parametrize("names", [TRL, VERL, TRANSFORMERS, VLLM])
def test_translations_name_settings_that_a_job_has(names: Mapping[str, str]) -> None:
    known = keys_of(inspect.type_info(LaunchConfig))
    assert {"training.loss", "rollout.sampling.max_new_tokens", "engines.arguments"} <= known
    for key, ours in names.items():
        for path in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", ours):
            assert path in known, key


def test_each_name_without_a_counterpart_has_a_reason() -> None:
    without = {key for names in (TRL, VERL) for key, ours in names.items() if not ours}
    assert without == set(REASONS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kl_coefficient = 0.001", "training.beta is not a known key: TRL's beta is training.kl_coefficient here"),
        ("samples_per_group = 8", "rollout.num_generations is not a known key: TRL's num_generations is rollout.samples"),
        ("warmup_steps = 2", "training.ppo_epochs is not a known key: verl's ppo_epochs has no counterpart here; the trainer"),
        ("warmup_steps = 2", "training.lr_scheduler_type is not a known key: TRL's lr_scheduler_type has no counterpart here; the learning rate stays"),
    ],
)  # fmt: skip
def test_error_about_a_key_of_trl_or_verl_names_ours(tmp_path: Path, line: str, said: str) -> None:
    wrong = re.search(r"\.(\w+) is", said)
    assert wrong is not None
    job = tmp_path / "job.toml"
    job.write_text(JOB.read_text().replace(line, f"{wrong[1]} = {line.rpartition(' ')[2]}"))
    _, mistakes = read_job(job)
    assert any(mistake.startswith(said) for mistake in mistakes), mistakes


def test_recipes_page_and_errors_translate_the_same_names_of_trl() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    table = page.partition("| `GRPOConfig` | here |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`([a-z_]+)", row)}
    same = set(SamplingParams.__struct_fields__) | keys_of(inspect.type_info(LaunchConfig))
    unknown = {n for n in names if not translated(n) and not any(n in each for each in same)}
    assert len(names) >= 20
    assert not unknown


def table_of_losses() -> str:
    """Return the settings of all losses as a table in Markdown."""
    lines = [f"| setting of `[training]` | {' | '.join(LOSSES)} |", f"|---{'|---' * len(LOSSES)}|"]
    sections = [TrainingSection(model="m", loss=name) for name in LOSSES]
    rows = {"advantages": [section.advantage().value for section in sections]}
    for name in LossConfig.__struct_fields__:
        values = [msgspec.to_builtins(section.loss_config())[name] for section in sections]
        if name == "constant":
            values = ["largest answer" if s.loss == "dr_grpo" else "" for s in sections]
        rows[name] = [f"{value:g}" if isinstance(value, float) else value for value in values]
    own = TrainingSection.__struct_fields__
    for name, values in rows.items():
        shown = f"`{name}`" if name in own else f"{name} (only by `loss`)"
        lines.append(f"| {shown} | {' | '.join(values)} |")
    return "\n".join(lines)


def test_launch_page_has_the_defaults_of_every_loss() -> None:
    assert table_of_losses() in (ROOT / "docs" / "launch.md").read_text(), table_of_losses()
