"""Time to capture the layout of an engine with many stacked experts.

The model has the tensors of Qwen3-30B-A3B (18 867 in the checkpoint); the arguments set their widths. Small widths
show the time per tensor, the real widths (`--hidden 2048 --inter 768 --vocab 151936 --heads 32 --device cuda`) also
the time per byte. The same run measures two lower limits: only loading tensors that are already in memory, and one
copy of the model's bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from harness import Row, parser, report
from windlass.element_ids.codes import CheckpointSpec, Codes
from windlass.element_ids.memory import fingerprint
from windlass.engines.capture.capture import capture
from windlass.engines.capture.checkpoint import StoredCheckpoint
from windlass.engines.capture.memory import held_by
from windlass.layout.dtypes import DType

HEAD, KV_HEADS = 128, 4


class Layer(torch.nn.Module):
    """Layer with fused attention projections, and experts in two stacked tensors."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        head = min(HEAD, args.hidden)
        q, kv = args.heads * head, KV_HEADS * head
        self.sizes = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}
        shapes = {
            "qkv": (q + 2 * kv, args.hidden),
            "o": (args.hidden, q),
            "q_norm": (head,),
            "k_norm": (head,),
            "before": (args.hidden,),
            "after": (args.hidden,),
            "gate": (args.experts, args.hidden),
            "w13": (args.experts, 2 * args.inter, args.hidden),
            "w2": (args.experts, args.hidden, args.inter),
        }
        for name, shape in shapes.items():
            made = torch.zeros(shape, dtype=torch.bfloat16, device=args.device)
            self.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))


class Model(torch.nn.Module):
    """Whole model of an engine rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.rows = [Layer(args) for _ in range(args.layers)]
        self.layers = torch.nn.ModuleList(self.rows)
        shapes = {"embed": (args.vocab, args.hidden), "head": (args.vocab, args.hidden)}
        for name, shape in {**shapes, "norm": (args.hidden,)}.items():
            made = torch.zeros(shape, dtype=torch.bfloat16, device=args.device)
            self.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))
        self.inter = args.inter

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy each checkpoint tensor to its part of a parameter, like an engine's loader."""
        layers = self.rows
        for name, tensor in weights:
            match name.split("."):
                case [own]:
                    self.get_parameter(own).copy_(tensor)
                case [layer, "q" | "k" | "v" as part]:
                    begin, rows = layers[int(layer)].sizes[part]
                    fused = layers[int(layer)].get_parameter("qkv")
                    fused.narrow(0, begin, rows).copy_(tensor)
                case [layer, own]:
                    layers[int(layer)].get_parameter(own).copy_(tensor)
                case [layer, expert, "down"]:
                    layers[int(layer)].get_parameter("w2")[int(expert)].copy_(tensor)
                case [layer, expert, part]:
                    memory = layers[int(layer)].get_parameter("w13")[int(expert)]
                    begin = self.inter if part == "up" else 0
                    memory.narrow(0, begin, self.inter).copy_(tensor)
                case _:
                    raise AssertionError(name)


def specs_of(args: argparse.Namespace) -> list[CheckpointSpec]:
    """Return the tensors of the checkpoint."""
    head = min(HEAD, args.hidden)
    q, kv = args.heads * head, KV_HEADS * head
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (args.vocab, args.hidden),
        "head": (args.vocab, args.hidden),
        "norm": (args.hidden,),
    }
    for layer in range(args.layers):
        of_layer = {
            "q": (q, args.hidden),
            "k": (kv, args.hidden),
            "v": (kv, args.hidden),
            "o": (args.hidden, q),
            "q_norm": (head,),
            "k_norm": (head,),
            "before": (args.hidden,),
            "after": (args.hidden,),
            "gate": (args.experts, args.hidden),
        }
        for expert in range(args.experts):
            of_layer[f"{expert}.gate"] = of_layer[f"{expert}.up"] = (args.inter, args.hidden)
            of_layer[f"{expert}.down"] = (args.hidden, args.inter)
        shapes |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
    return [CheckpointSpec(name, shape, DType.BFLOAT16) for name, shape in sorted(shapes.items())]


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds of `work`, including the GPU work that it queues."""
    begun = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    args_of = parser(__doc__ or "")
    args_of.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, value in (("layers", 48), ("experts", 128), ("hidden", 32), ("inter", 16)):
        args_of.add_argument(f"--{name}", type=int, default=value)
    args_of.add_argument("--vocab", type=int, default=1000)
    args_of.add_argument("--heads", type=int, default=4)
    args_of.add_argument(
        "--reference", action="store_true", help="compare with the first loaded checkpoint"
    )
    args = args_of.parse_args()
    specs, model = specs_of(args), Model(args)
    codes = Codes(specs, args.device)
    model.load(codes.random(9))
    before = {name: fingerprint(h.memory()) for name, h in held_by(model).items()}
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    loads = 0

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        nonlocal loads
        loads += 1
        model.load(weights)

    with tempfile.TemporaryDirectory() as folder:
        reference = None
        if args.reference:
            save_file({n: t.cpu() for n, t in codes.random(9)}, Path(folder) / "model.safetensors")
            reference = StoredCheckpoint(Path(folder))
        begun = time.perf_counter()
        captured = capture(model, specs, load, worker="engine/0", reference=reference)
        capture_s = time.perf_counter() - begun
    after = {name: fingerprint(h.memory()) for name, h in held_by(model).items()}
    assert after == before, "capture must leave the weights as they were"
    # Tensors of one shape share one tensor, so that the time does not include creating them.
    made = {s.shape: torch.zeros(s.shape, dtype=torch.bfloat16, device=args.device) for s in specs}
    load_s = seconds(lambda: model.load((s.name, made[s.shape]) for s in specs), args.device)
    size = min(nbytes, 1 << 30)
    one, other = (torch.zeros(size, dtype=torch.uint8, device=args.device) for _ in range(2))
    other.copy_(one)
    copy_s = seconds(lambda: other.copy_(one), args.device) * nbytes / size
    case = f"{args.device}, {len(specs)} tensors, {nbytes / 1e9:.3g} GB"
    rows = [
        Row(case, "capture", capture_s, "s", reference_name, value)
        for reference_name, value in (
            (f"its {loads} loads alone", loads * load_s),
            ("one memcpy", copy_s),
        )
    ]
    for stage, stage_s in captured.seconds.items():
        rows.append(Row(case, stage, stage_s, "s", "capture", capture_s))
    report(rows, args.json, "Capture of a layout")


if __name__ == "__main__":
    main()
