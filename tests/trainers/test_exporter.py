"""Exporters of frameworks are captured on element numbers in place of weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import exporting_rank
import pytest
import torch
import torch.multiprocessing as mp

from windlass.errors import ConfigError, UnsupportedLayout
from windlass.layout.naming.place import Placed
from windlass.trainers import exporter
from windlass.trainers.exporter import captured_export
from windlass.trainers.fsdp import describe_trainer

Tensors = dict[str, torch.Tensor]
Exported = Iterable[tuple[str, torch.Tensor]]


def parameters(**shapes: tuple[int, ...]) -> Tensors:
    """Return bfloat16 parameters with distinct values."""
    found: Tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        found[name] = torch.nn.Parameter(values.bfloat16())
    return found


def rebuilt(
    tensors: Tensors, found: dict[str, Placed], like: torch.Tensor, name: str
) -> torch.Tensor:
    """Return an exported tensor as the boxes describe it."""
    made = torch.full(like.shape, torch.nan, dtype=like.dtype)
    for source, placed in found.items():
        for shard in placed.shards:
            if shard.tensor == name:
                assert shard.global_shape == like.shape
                edges = zip(shard.box.offsets, shard.box.ends, strict=True)
                view = (
                    tensors[source]
                    .detach()
                    .as_strided(shard.box.sizes, shard.strides, shard.offset)
                )
                made[tuple(slice(begin, end) for begin, end in edges)] = view.to(like.dtype)
    return made


def split(tensors: Tensors) -> Exported:
    """Split rows of query groups, as for `linear_qkv`."""
    groups = tensors["fused"].view(2, 4, 3, 6)
    yield "q", groups[:, :2].reshape(-1, 6)
    yield "k", groups[:, 2].reshape(-1, 6)
    yield "v", groups[:, 3].reshape(-1, 6)


def joined(tensors: Tensors) -> Exported:
    yield "fused", torch.cat([tensors["a"], tensors["b"]])


def stacked(tensors: Tensors) -> Exported:
    yield "experts", torch.stack([tensors["a"].t(), tensors["b"].t()])


def rotary(tensors: Tensors) -> Exported:
    yield "q", tensors["fused"].view(4, 2, 3, 6).transpose(1, 2).reshape(24, 6)


def repeated(tensors: Tensors) -> Exported:
    yield "k", tensors["a"].repeat_interleave(2, 0)


def cast(tensors: Tensors) -> Exported:
    yield "a", tensors["a"].float()


def cropped(tensors: Tensors) -> Exported:
    yield "a", tensors["a"][:3]


def with_constants(tensors: Tensors) -> Exported:
    yield "inv_freq", torch.arange(4.0)
    yield "a", tensors["a"]


CASES: list[tuple[Callable[[Tensors], Exported], Tensors]] = [
    (split, parameters(fused=(24, 6))),
    (joined, parameters(a=(4, 6), b=(2, 6))),
    (stacked, parameters(a=(4, 6), b=(4, 6))),
    (rotary, parameters(fused=(24, 6))),
    (repeated, parameters(a=(4, 6))),
    (cast, parameters(a=(4, 6))),
    (cropped, parameters(a=(4, 6))),
    (with_constants, parameters(a=(1,))),
]


@pytest.mark.parametrize("exact_numel", [0, 1 << 20], ids=["by_row", "by_place"])
@pytest.mark.parametrize(
    ("export", "tensors"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_boxes_give_what_the_exporter_yields(
    export: Callable[[Tensors], Exported],
    tensors: Tensors,
    exact_numel: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "EXACT_NUMEL", exact_numel)
    before = {name: (t.data_ptr(), t.detach().clone()) for name, t in tensors.items()}
    found = captured_export(tensors, lambda: export(tensors), required=tensors, deadline_s=5)
    for name, (address, values) in before.items():
        assert tensors[name].data_ptr() == address
        assert torch.equal(tensors[name], values)
    for name, want in export(tensors):
        if name != "inv_freq":
            assert torch.equal(rebuilt(tensors, found, want.detach(), name), want)


def test_padding_that_is_not_exported_is_counted() -> None:
    tensors = parameters(a=(4, 6))
    assert (
        captured_export(tensors, lambda: cropped(tensors), required=tensors, deadline_s=5)[
            "a"
        ].padding
        == 6
    )


@pytest.mark.parametrize(
    "compute",
    [
        lambda a: a * 2,
        lambda a: a + 1,
        lambda a: -a,
        lambda a: a.to(torch.float8_e4m3fn),
        lambda a: a @ a.t(),
        lambda a: a.clamp(max=0),
        lambda a: torch.cat([a[:1], a[1:] * 0.5]),
    ],
    ids=["scaled", "shifted", "negated", "quantised", "multiplied", "clamped", "one_row_scaled"],
)
@pytest.mark.parametrize("exact_numel", [0, 1 << 20], ids=["by_row", "by_place"])
def test_computed_tensors_are_refused_by_name(
    compute: Callable[[torch.Tensor], torch.Tensor],
    exact_numel: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "EXACT_NUMEL", exact_numel)
    tensors = parameters(a=(40, 6), b=(4, 6))

    def export() -> Exported:
        yield "b", tensors["b"]
        yield "model.a.weight", compute(tensors["a"])

    with pytest.raises(UnsupportedLayout, match=r"computed values in 'model\.a\.weight'; pass"):
        captured_export(tensors, export, required=tensors, deadline_s=5)


def test_a_merged_adapter_is_refused() -> None:
    peft = pytest.importorskip("peft")
    bare = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    model = peft.get_peft_model(
        bare, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)
    )

    tensors: Tensors = dict(model.named_parameters())

    def export() -> Exported:
        model.merge_adapter()
        yield "weight", model.base_model.model[0].base_layer.weight.detach().clone()
        model.unmerge_adapter()

    with pytest.raises(UnsupportedLayout, match="computed values in 'weight'"):
        captured_export(tensors, export, required=tensors, deadline_s=5)


def test_a_parameter_that_is_not_exported_is_refused_by_name() -> None:
    tensors = parameters(a=(4, 6), value_head=(1, 6))
    with pytest.raises(UnsupportedLayout, match="no elements of 'value_head'; name their prefixes"):
        captured_export(tensors, lambda: cast(tensors), required=tensors, deadline_s=5)


def test_two_parameters_under_one_name_are_refused() -> None:
    tensors = parameters(a=(4, 6), b=(4, 6))
    with pytest.raises(UnsupportedLayout, match="'w' from one parameter, got 'a' and 'b'"):
        captured_export(
            tensors,
            lambda: [("w", tensors["a"]), ("w", tensors["b"])],
            required=tensors,
            deadline_s=5,
        )


def test_the_error_of_an_exporter_is_in_the_message() -> None:
    tensors = parameters(a=(4, 6))
    with pytest.raises(ConfigError, match="exporter: failed on rank 0: KeyError: 'b'"):
        captured_export(tensors, lambda: joined(tensors), required=tensors, deadline_s=5)


WRONG_YIELDS: dict[str, tuple[Callable[[int, torch.Tensor], Any], str]] = {
    "dict": (lambda _, a: {"a": a}, r"pairs of a name and a tensor, got 'a'"),
    "array": (
        lambda _, a: [("a", a.detach().float().numpy())],
        r"tensors with memory, got a ndarray for 'a'",
    ),
    "meta": (lambda _, a: [("a", a.to("meta"))], r"got a tensor on the meta device for 'a'"),
    "more_later": (
        lambda run, a: [("a", a), *([("b", a)] if run else [])],
        r"the same tensors in every run, got 'b' of shape \(4, 6\), but no such tensor in the first",
    ),
    "other_shape_later": (
        lambda run, a: [("a", a.T if run else a)],
        r"'a' of shape \(6, 4\), but shape \(4, 6\) in the first run",
    ),
    "fewer_later": (
        lambda run, a: [("a", a), *([] if run else [("b", a)])],
        r"the same tensors in every run, got no 'b' in the last run",
    ),
}


@pytest.mark.parametrize("kind", WRONG_YIELDS)
def test_an_exporter_that_yields_something_wrong_is_refused_with_the_reason(kind: str) -> None:
    tensors, runs = parameters(a=(4, 6)), itertools.count()
    wrong, reason = WRONG_YIELDS[kind]
    with pytest.raises(ConfigError, match=reason):
        captured_export(
            tensors, lambda: wrong(next(runs), tensors["a"]), required=tensors, deadline_s=5
        )


def launched(case: str, folder: Path) -> list[list[str]]:
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        exporting_rank.run, (2, case, str(folder)), nprocs=2, start_method="forkserver"
    )
    return [(folder / f"{case}-{rank}").read_text().splitlines() for rank in range(2)]


def test_each_rank_describes_its_part_of_gathered_tensors(tmp_path: Path) -> None:
    first, second = launched("gathers", tmp_path)
    assert first[1:] == [
        "rows: q (6, 4) [0:3, 0:4] 0 (4, 1)",
        "columns: o (2, 6) [0:2, 0:3] 0 (3, 1)",
        "norm: norm (5,) [0:5] 0 (1,)",
    ]
    assert second[1:] == [
        "rows: q (6, 4) [3:6, 0:4] 0 (4, 1)",
        "columns: o (2, 6) [0:2, 3:6] 0 (3, 1)",
        "norm: norm (5,) [0:5] 0 (1,)",
        "last: head (4,) [0:4] 0 (1,)",
    ]


def test_every_rank_fails_within_the_deadline_if_the_exporter_fails_on_one(tmp_path: Path) -> None:
    first, second = launched("raises", tmp_path)
    assert second[1].startswith("ConfigError: exporter: failed on rank ")
    assert first[1].startswith("ConfigError")
    assert float(first[0]) < 10


def test_an_exporter_that_yields_on_one_rank_is_refused(tmp_path: Path) -> None:
    for lines in launched("only the first", tmp_path):
        assert "failed on rank 1: ConfigError: the exporter yielded no tensor" in lines[1]


def test_an_exporter_of_an_fsdp2_model_equals_a_name_map(tmp_path: Path) -> None:
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        exporting_rank.shard, (2, str(tmp_path)), nprocs=2, start_method="forkserver"
    )


def test_an_exporter_excludes_a_name_map() -> None:
    with pytest.raises(ConfigError, match="without name_map and stacked"):
        describe_trainer(
            torch.nn.Linear(2, 2),
            group="trainer",
            name_map=lambda name: name,
            exporter=lambda models: models[0].state_dict().items(),
        )


def test_hooks_of_a_state_dict_are_followed() -> None:
    model = torch.nn.Linear(4, 6, bias=False)

    def split(_module: torch.nn.Module, state: Tensors, prefix: str, _metadata: object) -> None:
        state["gate.weight"], state["up.weight"] = state.pop(f"{prefix}weight").chunk(2)

    model.register_state_dict_post_hook(split)  # type: ignore[no-untyped-call]
    manifest = describe_trainer(
        model,
        group="trainer",
        name_map=None,
        exporter=lambda models: models[0].state_dict().items(),
    ).manifest
    assert [(s.tensor, s.box.sizes, s.offset_bytes) for s in manifest.shards()] == [
        ("gate.weight", (3, 4), 0),
        ("up.weight", (3, 4), 48),
    ]
