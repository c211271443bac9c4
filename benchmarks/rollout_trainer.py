"""Trainer rank of `bench_rollout.py`. For each line on stdin it changes its values and publishes them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers

import windlass


def main() -> None:
    url, config_path = sys.argv[1:]
    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(**json.loads(Path(config_path).read_text()))
    torch.manual_seed(99)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with windlass.connect_trainer(
        model, controller=url, token=os.environ["WINDLASS_TOKEN"], transport="cma"
    ) as trainer:
        for line in sys.stdin:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-1.0)
            trainer.publish(int(line))
            print("published", flush=True)


if __name__ == "__main__":
    main()
