"""GRPO on arithmetic with a chat template and a stop text. This file has the reward and makes the model and the data.

python examples/arithmetic/arithmetic.py MODEL_FOLDER    make a tiny chat model and a file of questions
windlass launch examples/arithmetic/arithmetic.toml      train it; set `model` in the TOML for another model
"""

import json
import random
import re
import sys
from pathlib import Path

from windlass.jobs import DatasetRecipe
from windlass.rollout import Rollout


def reward(rollout: Rollout) -> float:
    """Return 1 for the right number, 0.1 for another number in the right form, and otherwise 0."""
    found = re.search(r"<answer>(\d+)</answer>", rollout.text)
    if found is None:
        return 0.0
    return 1.0 if found[1] == rollout.metadata["answer"] else 0.1  # type: ignore[index]


class Arithmetic(DatasetRecipe):
    """Each row of `[data]` is a task, and `[rewards]` calls `reward`. So nothing is left to write here."""


def make_data(folder: Path) -> list[dict[str, str]]:
    """Write questions and their answers as JSON lines, and return them."""
    rows = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b)}
        for a in range(6)
        for b in range(6)
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rows


def make_model(folder: Path, num_steps: int = 200) -> None:
    """Write a chat model that knows the form of an answer, and gives the right number about a third of the time."""
    print("importing torch and transformers", flush=True)
    import tokenizers
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    rows = make_data(folder)
    random.seed(0)
    torch.manual_seed(0)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    learned.train_from_iterator(
        [f"{row['question']}<answer>{row['answer']}</answer>" for row in rows],
        tokenizers.trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    # Engines and workers load the tokenizer for this kind of model, which splits text in its own way.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
    for step in range(num_steps):
        tokens, labels = [], []
        for row in rows:
            # Wrong answers in the last steps leave something to learn.
            is_right = step < num_steps - 30 or random.random() < 0.5
            answer = row["answer"] if is_right else str(random.randrange(11))
            turns = [{"role": "user", "content": row["question"]}]
            prompt = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=False
            )
            reply = tokenizer(f"<answer>{answer}</answer> I am sure.<|end|>").input_ids
            tokens.append(torch.tensor([*prompt, *reply]))
            labels.append(torch.tensor([-100] * len(prompt) + reply))
        pad = torch.nn.utils.rnn.pad_sequence
        padded = pad(tokens, batch_first=True), pad(labels, batch_first=True, padding_value=-100)
        loss = model(padded[0], labels=padded[1]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        if step % 10 == 0:
            print(f"step {step} of {num_steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
