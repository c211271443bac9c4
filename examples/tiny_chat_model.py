"""Makes the tiny chat models of the examples. You do not need it: put the folder of your own model into the job's file."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

Message = dict[str, str]

ROLES = ("system", "user", "assistant", "tool")
TEMPLATE = """\
{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}\
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>\
{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def write_tiny_chat_model(
    folder: Path,
    conversations: Callable[[int], Sequence[Sequence[Message]]],
    num_steps: int = 200,
) -> None:
    """Train a tiny model on the assistant's messages of conversations, and write it with its tokenizer. Print the progress.

    Args:
        folder: folder of the checkpoint.
        conversations: returns the batch of a training step; the number of the step is its argument.
        num_steps: number of training steps.
    """
    print("importing torch and transformers", flush=True)
    import tokenizers
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    torch.manual_seed(0)
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = tokenizers.decoders.ByteLevel()
    learned.train_from_iterator(
        [message["content"] for messages in conversations(0) for message in messages],
        tokenizers.trainers.BpeTrainer(
            vocab_size=384,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|pad|>", "<|end|>", *(f"<|{role}|>" for role in ROLES)],
            show_progress=False,
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
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
        for messages in conversations(step):
            ids: list[int] = []
            targets: list[int] = []
            for message in messages:
                head = tokenizer.convert_tokens_to_ids([f"<|{message['role']}|>"])
                said = tokenizer(f"{message['content']}<|end|>").input_ids
                is_target = message["role"] == "assistant"
                ids += head + said
                targets += [-100] * len(head) + (said if is_target else [-100] * len(said))
            tokens.append(torch.tensor(ids))
            labels.append(torch.tensor(targets))
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
