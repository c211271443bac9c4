"""A job whose recipe yields messages, in worker processes and in evaluations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import transformers
from demo_checkpoint import write_checkpoint
from launched_jobs import EXAMPLE, launched, write

from windlass.jobs.audit import AUDIT, read_audit

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
RECIPE = """
import itertools
from windlass.jobs import Recipe, Task
QUESTION = {"role": "user", "content": "3 + 4"}
class R(Recipe):
    def tasks(self):
        for _ in itertools.count():
            yield Task(prompt=[QUESTION])
    def rewards(self, group):
        assert all(r.text for r in group.rollouts)
        return [float(len(r.prompt_ids)) for r in group.rollouts]
    def evaluation_tasks(self):
        return [Task(prompt=[QUESTION]), Task(prompt="3 + 4")]
"""


def test_a_job_trains_and_evaluates_on_messages_and_text(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tokenizer", chat_template=TEMPLATE)
    model = json.loads((EXAMPLE / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**model, "vocab_size": 300}))
    job = write(tmp_path, recipe=RECIPE, steps=2, rollout=f'tokenizer = "{folder}"')
    text = job.read_text().replace(f"{EXAMPLE}/model.json", f"{tmp_path}/model.json")
    job.write_text(text.replace('"--max-positions", "32"', '"--max-positions", "64"'))
    job.write_text(f"audit = true\n{job.read_text()}\n[evaluation]\nevery = 2\n")
    with launched(job) as running:
        assert running.end() == 0, running.text
    assert "loading the tokenizer, while engines start\n" in running.text, running.text
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    rendered, plain = (len(tokenizer.encode(text)) for text in ("<user>3 + 4<assistant>", "3 + 4"))
    line = rf"^step 2: reward {rendered:.4f}, 4 samples, \d+\.\d s, loss "
    assert re.search(line, running.text, re.MULTILINE), running.text
    (line,) = (tmp_path / "out/evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == (rendered + plain) / 2
    # `windlass audit` shows text by this tokenizer.
    assert read_audit(tmp_path / "out" / AUDIT, 1).tokenizer == str(folder.resolve())
