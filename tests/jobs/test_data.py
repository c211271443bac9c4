"""Rows of data sets, and the order in which a `DatasetRecipe` makes tasks of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windlass.cli.main import main
from windlass.errors import ConfigError
from windlass.jobs import DatasetRecipe, LaunchConfig, load_config
from windlass.jobs.data import load_rows

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch" / "job.toml"


def write_rows(path: Path, num_rows: int) -> Path:
    questions = [f"é{n}?" * (n + 1) for n in range(num_rows)]
    lines = [
        json.dumps({"n": n, "question": said, "turns": [{"role": "user", "content": said}]})
        for n, said in enumerate(questions)
    ]
    # An empty line is no row, and the last line need not end with a line break.
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def recipe_of(tmp_path: Path, num_rows: int = 7, **data: Any) -> DatasetRecipe:
    path = write_rows(tmp_path / "rows.jsonl", num_rows)
    base: Any = msgspec.to_builtins(load_config(EXAMPLE), enc_hook=str)
    given = {
        **base,
        "rollout": {**base["rollout"], "tokenizer": "folder"},
        "data": {"path": str(path), "prompt": "question", **data},
    }
    recipe = DatasetRecipe()
    recipe.check(msgspec.convert(given, LaunchConfig))
    return recipe


def numbers(recipe: DatasetRecipe, count: int) -> list[int]:
    """Return the row numbers of the next tasks."""
    tasks: Any = [task.metadata for task in itertools.islice(recipe.tasks(), count)]
    return [row["n"] for row in tasks]


def test_each_epoch_has_all_rows_in_an_order_of_its_own(tmp_path: Path) -> None:
    found = numbers(recipe_of(tmp_path, epochs=3), 100)
    epochs = [found[n : n + 7] for n in range(0, 21, 7)]
    assert len(found) == 21
    assert all(sorted(epoch) == [*range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert numbers(recipe_of(tmp_path, epochs=3), 100) == found
    assert numbers(recipe_of(tmp_path, epochs=3, seed=1), 100) != found
    assert numbers(recipe_of(tmp_path, shuffle=False), 16) == [*range(7), *range(7), 0, 1]


@pytest.mark.parametrize("before", ["", "\n"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, before: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{before}{{"n": 1}}\n{{"n": 2}}\n', encoding="utf-8-sig")
    assert list(load_rows(str(path))) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("position", [1, 6, 7, 8, 20, 21])
def test_a_recipe_continues_at_every_position(tmp_path: Path, position: int) -> None:
    whole = numbers(recipe_of(tmp_path, epochs=3), 100)
    first = recipe_of(tmp_path, epochs=3)
    assert numbers(first, position) == whole[:position]
    second = recipe_of(tmp_path, epochs=3)
    second.load(msgspec.msgpack.decode(msgspec.msgpack.encode(first.state())))
    assert numbers(second, 100) == whole[position:]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"shuffle": False}])
def test_an_epoch_keeps_its_order_if_the_settings_change(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    first = recipe_of(tmp_path)
    begun = numbers(first, 10)[7:]
    # The third job continues in the same epoch as the second.
    second = recipe_of(tmp_path, **changed)
    second.load(first.state())
    begun += numbers(second, 2)
    third = recipe_of(tmp_path, **changed)
    third.load(second.state())
    begun += numbers(third, 2)
    assert begun == numbers(recipe_of(tmp_path), 14)[7:]
    assert numbers(third, 7) == numbers(recipe_of(tmp_path, **changed), 21)[14:]


def test_a_row_that_is_refused_is_named_by_its_number(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, shuffle=False)
    file = tmp_path / "rows.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n\n")
    file.write_text("\n".join([*lines[:3], '{"n": 3, "question": null}']), encoding="utf-8")
    recipe.rows = load_rows(str(file))
    with pytest.raises(ConfigError, match=r"row 3 of '.*rows.jsonl' \(from 0\): data.prompt must"):
        numbers(recipe, 4)


def test_a_position_of_another_data_set_is_refused(tmp_path: Path) -> None:
    state = recipe_of(tmp_path).state()
    with pytest.raises(ConfigError, match="must have the 7 rows that the checkpoint's data set ha"):
        recipe_of(tmp_path, num_rows=8).load(state)


def test_a_prompt_is_a_text_or_messages(tmp_path: Path) -> None:
    user = {"role": "user", "content": "é0?"}
    row = {"question": "é0?", "turns": [user]}
    assert recipe_of(tmp_path).prompt(row) == (user,)
    system = {"role": "system", "content": "Be brief."}
    assert recipe_of(tmp_path, system="Be brief.").prompt(row) == (system, user)
    assert recipe_of(tmp_path, chat=False).prompt(row) == "é0?"
    assert recipe_of(tmp_path, prompt="turns").prompt(row) == (user,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"prompt": "x"},
            r"data.prompt must .* got 'x' .* columns are \['n', 'question', 'turns'\]",
        ),
        (
            {"prompt": "n"},
            r"data.prompt must name a column that contains text or messages, got 'n' with the value 0",
        ),
        (
            {"columns": ["n", "answer"]},
            r"columns of data.path, got 'answer'; the columns are \['n', 'question', 'turns'\]",
        ),
    ],
)
def test_check_names_a_wrong_column_and_the_columns_there_are(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe_of(tmp_path, **settings)
    assert len(recipe_of(tmp_path, columns=["n"]).rows) == 7


def test_launch_check_reads_the_first_row_and_the_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, recipe = tmp_path / "job.toml", tmp_path / "recipe.py"
    rows = write_rows(tmp_path / "rows.jsonl", 3)
    recipe.write_text(
        "from windlass.jobs import DatasetRecipe\n"
        "class R(DatasetRecipe):\n    pass\n"
        "def reward(rollout):\n    return 1.0\n"
    )
    text = f"""
        steps = 1
        output_dir = "{tmp_path}/out"
        recipe = {{ file = "{recipe}", name = "R" }}
        trainer = {{ script = "{recipe}" }}
        rewards = {{ kind = "processes" }}
        data = {{ path = "{rows}", prompt = "COLUMN", columns = ["n"] }}
        engines = [{{ name = "e", model = "{EXAMPLE.parents[1] / "launch" / "model.json"}" }}]
        [rollout]
        groups_per_step = 1
        samples_per_group = 2
        sampling = {{ max_new_tokens = 2 }}
        """
    job.write_text(text.replace("COLUMN", "question"))
    assert main(["launch", str(job), "--check"]) == 2
    assert "rollout.tokenizer must be the folder" in capsys.readouterr().err
    text += f'tokenizer = "{tmp_path}"\n'
    job.write_text(text.replace("COLUMN", "question"))
    assert main(["launch", str(job), "--check"]) == 0, capsys.readouterr()
    job.write_text(text.replace("COLUMN", "query"))
    assert main(["launch", str(job), "--check"]) == 2
    assert "columns are ['n', 'question', 'turns']" in capsys.readouterr().err
    job.write_text(
        text.replace("COLUMN", "question").replace('"processes"', '"processes", function = "no"')
    )
    assert main(["launch", str(job), "--check"]) == 2
    assert "rewards.function must be a function of recipe.py, which has ['reward'], got 'no'" in (
        " ".join(capsys.readouterr().err.split())
    )
    recipe.write_text(recipe.read_text().replace("(rollout)", "(completions, solution, **kwargs)"))
    job.write_text(text.replace("COLUMN", "question"))
    assert main(["launch", str(job), "--check"]) == 2
    assert "must take one argument, a Rollout " in capsys.readouterr().err


def test_rows_of_a_file_are_read_by_number(tmp_path: Path) -> None:
    rows = load_rows(str(write_rows(tmp_path / "rows.jsonl", 5)))
    assert [row["n"] for row in rows] == [*range(5)]
    assert rows[-1]["question"] == "é4?" * 5
    assert [row["n"] for row in rows[1:3]] == [1, 2]
    broken = tmp_path / "broken.jsonl"
    for line in (b"[2]", b'{"a": "\xff"}', b'{"a": 1e999}'):
        broken.write_bytes(b'\n{"a": 1}\n' + line)
        with pytest.raises(ConfigError, match=r"data: line 3 of '.*' must be a JSON object"):
            load_rows(str(broken))


def test_data_sets_of_the_library_are_loaded_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra data is not installed")
    turns = [{"role": "user", "content": "a"}]
    table = {"n": [3, 4], "turns": [turns, turns]}
    whole = datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict(table), "test": datasets.Dataset.from_dict({"n": [5]})}
    )
    whole.save_to_disk(tmp_path / "both")
    rows = load_rows(str(tmp_path / "both"))
    assert [dict(row) for row in rows] == [{"n": n, "turns": turns} for n in (3, 4)]
    assert [dict(row) for row in load_rows(str(tmp_path / "both"), split="test")] == [{"n": 5}]
    with pytest.raises(ConfigError, match="with split 'none' cannot be loaded"):
        load_rows(str(tmp_path / "both"), split="none")
