"""After every update, an engine's loader recomputes the tensors that it computes from the checkpoint."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_capture import deliver
from test_engine_rank import Api
from test_quantized_updates import Rank, reference, update

import windlass
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.element_ids.codes import CheckpointSpec, Codes
from windlass.engines.capture.capture import capture
from windlass.engines.capture.checkpoint import StoredCheckpoint, checkpoint_specs
from windlass.engines.capture.description import Captured
from windlass.engines.capture.recompute import Search
from windlass.engines.engine_rank import EngineRank
from windlass.engines.spec import AgentSettings
from windlass.errors import PeerTimeout, UnsupportedLayout, WindlassError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.layout.quantization import QuantizedTensor, scale_shape
from windlass.memory.torch_dtypes import torch_dtype

TOKEN = "secret of the test"
LAYERS, HEADS, HIDDEN = 5, 8, 6
Weights = Iterator[tuple[str, torch.Tensor]]
FLOAT8 = torch.float8_e4m3fn


def specs_of(shapes: dict[str, tuple[int, ...]]) -> list[CheckpointSpec]:
    return [CheckpointSpec(name, shape, DType.BFLOAT16) for name, shape in sorted(shapes.items())]


def masters(specs: list[CheckpointSpec], seed: int) -> dict[str, torch.Tensor]:
    """Return the trainer's tensors, in float32, with values that bfloat16 cannot represent."""
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator) for s in specs}


def values(specs: list[CheckpointSpec], seed: int) -> dict[str, torch.Tensor]:
    """Return the checkpoint that a trainer with these masters saves."""
    held = masters(specs, seed)
    return {s.name: held[s.name].to(torch_dtype(s.dtype)) for s in specs}


def copies(checkpoint: dict[str, torch.Tensor]) -> Weights:
    return ((name, tensor.clone()) for name, tensor in checkpoint.items())


def stored(folder: Path, checkpoint: dict[str, torch.Tensor]) -> StoredCheckpoint:
    save_file(checkpoint, folder / "model.safetensors")
    return StoredCheckpoint(folder)


def bytes_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: t.detach().contiguous().view(torch.uint8).clone() for n, t in named}


def require_equal(have: torch.nn.Module, want: torch.nn.Module) -> None:
    found = bytes_of(have)
    for name, expected in bytes_of(want).items():
        assert torch.equal(found[name], expected), name


def sources(captured: Captured) -> set[str]:
    """Return the checkpoint tensors that the engine receives in a buffer."""
    assert captured.recompute is not None
    return {spec.name for spec, _ in captured.recompute.buffers}


class Named(torch.nn.Module):
    """A module with the given parameters; their names contain a slash instead of a dot."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            made = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            self.register_parameter(name.replace(".", "/"), made)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.get_parameter(name.replace(".", "/")).data


class Layer(torch.nn.Module):
    """A layer of a state space model.

    `decay` and `norm` are computed, `skip` (to float32) and `proj` copied, `folded` is the product of two tensors.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.decay = torch.nn.Parameter(torch.zeros(heads))
        self.skip = torch.nn.Parameter(torch.zeros(heads))
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN, dtype=torch.bfloat16))
        self.proj = torch.nn.Parameter(torch.zeros(heads, HIDDEN, dtype=torch.bfloat16))
        self.folded = torch.nn.Buffer(torch.zeros(HIDDEN, dtype=torch.bfloat16))


class Engine(torch.nn.Module):
    """One rank that cuts heads and, as SGLang does, writes into the tensors that the loader gets."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.rank, self.heads = rank, HEADS // size
        self.rows = [Layer(self.heads) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(self.rows)

    def load(self, weights: Weights) -> None:
        mine = slice(self.rank * self.heads, (self.rank + 1) * self.heads)
        given = dict(weights)
        for name, tensor in given.items():
            _, index, kind = name.split(".")
            layer = self.rows[int(index)]
            match kind:
                case "A_log":
                    layer.decay.data.copy_(-torch.exp(tensor[mine].float()))
                case "D":
                    layer.skip.data.copy_(tensor[mine])
                case "norm":
                    tensor += 1.0
                    layer.norm.data.copy_(tensor)
                case "proj":
                    layer.proj.data.copy_(tensor[mine])
                case "gain":
                    scale = given[f"layers.{index}.scale"]
                    layer.folded.copy_(tensor * scale)
                case _:
                    assert kind == "scale"


SPECS = specs_of(
    {
        f"layers.{i}.{kind}": shape
        for i in range(LAYERS)
        for kind, shape in {
            "A_log": (HEADS,), "D": (HEADS,), "norm": (HIDDEN,), "proj": (HEADS, HIDDEN),
            "gain": (HIDDEN,), "scale": (1,),
        }.items()
    }
)  # fmt: skip
COMPUTED_FROM = {
    f"layers.{i}.{k}" for i in range(LAYERS) for k in ("A_log", "norm", "gain", "scale")
}


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_an_update_equals_a_load_by_the_engines_own_loader(rank: int, size: int) -> None:
    fresh, engine = Engine(rank, size), Engine(rank, size)
    engine.load(copies(values(SPECS, 1)))
    before = bytes_of(engine)
    captured = capture(engine, SPECS, engine.load, worker="e/0")
    for name, tensor in bytes_of(engine).items():
        assert torch.equal(tensor, before[name]), name
    assert sources(captured) == COMPUTED_FROM
    assert len(captured.recomputed) == 3 * LAYERS
    assert captured.buffer_nbytes == 2 * LAYERS * (HEADS + HIDDEN + HIDDEN + 1)
    assert captured.unplaced == ()
    for seed in (2, 3):
        deliver(captured, values(SPECS, seed))
        fresh.load(copies(values(SPECS, seed)))
        require_equal(engine, fresh)


def test_the_number_of_loads_grows_with_the_logarithm_of_the_number_of_layers() -> None:
    counts = []
    for layers in (8, 64):
        engine = Named({f"norms.{i}": (2,) for i in range(layers)})
        specs = [CheckpointSpec(f"n.{i}.w", (2,), DType.FLOAT32) for i in range(layers)]
        loads: list[int] = []

        def load(weights: Weights, engine: Named = engine, loads: list[int] = loads) -> None:
            loads.append(0)
            for name, tensor in weights:
                engine[f"norms.{name.split('.')[1]}"].copy_(tensor + 1)

        captured = capture(engine, specs, load, worker="e/0")
        assert sources(captured) == {spec.name for spec in specs}
        counts.append(len(loads))
    assert counts[1] - counts[0] == 2 * 3


def test_only_computed_layers_receive_sources_for_the_loader() -> None:
    engine = Named({f"norms.{i}": (4,) for i in range(7)})
    specs = [CheckpointSpec(f"n.{i}.w", (4,), DType.FLOAT32) for i in range(7)]

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            index = int(name.split(".")[1])
            engine[f"norms.{index}"].copy_(tensor + 1 if index in (2, 5) else tensor)

    captured = capture(engine, specs, load, worker="e/0")
    assert sources(captured) == {"n.2.w", "n.5.w"}
    assert captured.recomputed == ("norms/2", "norms/5")


def test_a_tensor_that_mixes_layers_is_computed_from_all_of_them() -> None:
    engine = Named({"weight": (4, 4), "other": (4,)})
    specs = [CheckpointSpec(f"l.{i}.w", (4, 4), DType.FLOAT32) for i in range(6)]
    specs.append(CheckpointSpec("other", (4,), DType.FLOAT32))

    def load(weights: Weights) -> None:
        given = dict(weights)
        if "other" in given:
            engine["other"].copy_(given["other"])
        # The result depends on a source only in elements where this source is the larger one.
        if "l.1.w" in given:
            engine["weight"].copy_(torch.maximum(given["l.1.w"], given["l.4.w"].abs()))

    captured = capture(engine, specs, load, worker="e/0")
    assert {"l.1.w", "l.4.w"} <= sources(captured)
    assert "other" not in sources(captured)
    deliver(captured, (checkpoint := values(specs, 5)))
    assert torch.equal(
        engine["weight"], torch.maximum(checkpoint["l.1.w"], checkpoint["l.4.w"].abs())
    )


class MadeAnew(Layer):
    """A layer that, as in vLLM, replaces all its tensors as soon as one is loaded."""

    def load(self, given: dict[str, torch.Tensor]) -> None:
        held = dict([*self.named_parameters(), *self.named_buffers()])
        made = {name: torch.empty_like(tensor) for name, tensor in held.items()}
        if "A_log" in given:
            made["decay"].copy_(-torch.exp(given["A_log"].float()))
        for kind, name in (("D", "skip"), ("norm", "norm"), ("proj", "proj"), ("gain", "folded")):
            if kind in given:
                made[name].copy_(given[kind])
        for name, tensor in made.items():
            held[name].data.copy_(tensor)


class LayerByLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [MadeAnew(HEADS) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(self.rows)
        self.embed = torch.nn.Parameter(torch.zeros(3, 3, dtype=torch.bfloat16))

    def load(self, weights: Weights) -> None:
        by_layer: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in weights:
            if name == "embed":
                self.embed.data.copy_(tensor)
            else:
                _, index, kind = name.split(".")
                by_layer.setdefault(int(index), {})[kind] = tensor
        for at, tensors in by_layer.items():
            self.rows[at].load(tensors)


LAYERWISE = specs_of(
    {
        "embed": (3, 3),
        **{
            f"layers.{i}.{kind}": shape
            for i in range(LAYERS)
            for kind, shape in {
                "A_log": (HEADS,), "D": (HEADS,), "norm": (HIDDEN,), "proj": (HEADS, HIDDEN),
                "gain": (HIDDEN,),
            }.items()
        },
    }
)  # fmt: skip


def test_a_loader_that_rebuilds_a_layer_gets_the_whole_layer() -> None:
    fresh, engine = LayerByLayer(), LayerByLayer()
    engine.load(copies(values(LAYERWISE, 1)))
    captured = capture(engine, LAYERWISE, engine.load, worker="e/0")
    assert sources(captured) == {s.name for s in LAYERWISE if s.name != "embed"}
    received = [parameter.name for parameter in captured.manifest.parameters]
    assert received[0] == "embed"
    assert all(name.startswith("loader/") for name in received[1:]), "nothing is received twice"
    deliver(captured, values(LAYERWISE, 2))
    fresh.load(copies(values(LAYERWISE, 2)))
    require_equal(engine, fresh)


def test_a_loader_that_needs_a_whole_module_gets_it() -> None:
    one, two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    engine = torch.nn.ModuleDict({"one": one, "two": two})
    specs = [
        CheckpointSpec(f"{module}.{name}", shape, DType.FLOAT32)
        for module in ("one", "two")
        for name, shape in (("bias", (3,)), ("weight", (3, 3)))
    ]

    def load(weights: Weights) -> None:
        given = dict(weights)
        for module in {name.partition(".")[0] for name in given}:
            bias, weight = given[f"{module}.bias"], given[f"{module}.weight"]
            layer = one if module == "one" else two
            layer.weight.data.copy_(weight)
            layer.bias.data.copy_(bias + 1 if module == "two" else bias)

    captured = capture(engine, specs, load, worker="e/0")
    assert sources(captured) == {"two.bias", "two.weight"}
    deliver(captured, (checkpoint := values(specs, 4)))
    assert torch.equal(two.bias, checkpoint["two.bias"] + 1)
    assert torch.equal(one.bias, checkpoint["one.bias"])


def test_a_tensor_with_one_computed_part_is_computed_as_a_whole() -> None:
    engine = torch.nn.Linear(4, 6, bias=False)
    specs = [CheckpointSpec(n, (2, 4), DType.FLOAT32) for n in ("k", "q", "v")]

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            at = 2 * "kqv".index(name)
            engine.weight.data[at : at + 2].copy_(tensor * 3 if name == "q" else tensor)

    captured = capture(engine, specs, load, worker="e/0")
    assert sources(captured) == {"k", "q", "v"}
    deliver(captured, (checkpoint := values(specs, 4)))
    assert torch.equal(engine.weight[2:4], checkpoint["q"] * 3)
    assert torch.equal(engine.weight[4:], checkpoint["v"])


def test_only_ranks_that_compute_a_tensor_receive_its_sources() -> None:
    """Check experts that are computed only on one of two ranks."""
    specs = [CheckpointSpec(f"experts.{e}.w", (4, 3), DType.FLOAT32) for e in range(8)]
    for rank in (0, 1):
        engine = Named({"w": (4, 4, 3)})

        def load(weights: Weights, engine: Named = engine, rank: int = rank) -> None:
            for name, tensor in weights:
                expert = int(name.split(".")[1]) - 4 * rank
                if 0 <= expert < 4:
                    engine["w"][expert].copy_(tensor * tensor.abs().amax() if rank else tensor)

        captured = capture(engine, specs, load, worker=f"e/{rank}")
        if rank == 0:
            assert captured.recompute is None
        else:
            assert sources(captured) == {f"experts.{e}.w" for e in range(4, 8)}
        deliver(captured, (checkpoint := values(specs, 4)))
        for expert in range(4):
            tensor = checkpoint[f"experts.{expert + 4 * rank}.w"]
            assert torch.equal(
                engine["w"][expert], tensor * tensor.abs().amax() if rank else tensor
            )


RANK, NOPE, VDIM, MLA_HEADS = 128, 64, 64, 2
ROWS = MLA_HEADS * (NOPE + VDIM)


class Absorbed(torch.nn.Module):
    """Latent attention of a block-float8 checkpoint, with kv_b_proj dequantised into two projections.

    The projections are plain attributes. Every load replaces them or, with `bound`, copies into them.
    """

    def __init__(self, *, bound: bool) -> None:
        super().__init__()
        self.bound = bound
        self.kv_b = torch.nn.Parameter(torch.zeros(ROWS, RANK).to(FLOAT8), requires_grad=False)
        self.kv_b_scale = torch.nn.Parameter(
            torch.zeros(scale_shape((ROWS, RANK))), requires_grad=False
        )
        self.o = torch.nn.Parameter(torch.zeros(4, 4).bfloat16(), requires_grad=False)
        self.w_kc: torch.Tensor | None = None
        self.w_vc: torch.Tensor | None = None

    def load(self, weights: Weights) -> None:
        targets = {
            "a.kv_b.weight": self.kv_b,
            "a.kv_b.weight_scale_inv": self.kv_b_scale,
            "a.o.weight": self.o,
        }
        for name, tensor in weights:
            targets[name].data.copy_(tensor)
        scale = self.kv_b_scale.repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)[:, :RANK]
        full = (self.kv_b.float() * scale).bfloat16().view(MLA_HEADS, NOPE + VDIM, RANK)
        w_kc, w_vc = full[:, :NOPE], full[:, NOPE:]
        made = w_kc.transpose(1, 2).contiguous().transpose(1, 2), w_vc.contiguous().transpose(1, 2)
        if self.bound and self.w_kc is not None and self.w_vc is not None:
            self.w_kc.copy_(made[0])
            self.w_vc.copy_(made[1])
        else:
            self.w_kc, self.w_vc = made


ABSORBED = [
    CheckpointSpec("a.kv_b.weight", (ROWS, RANK), DType.FLOAT8_E4M3),
    CheckpointSpec("a.kv_b.weight_scale_inv", scale_shape((ROWS, RANK)), DType.FLOAT32),
    CheckpointSpec("a.o.weight", (4, 4), DType.BFLOAT16),
]


def absorbed_checkpoint(seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the trainer's two tensors and the checkpoint that an engine would load."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, RANK, generator=generator).bfloat16()
    output = torch.randn(4, 4, generator=generator).bfloat16()
    quantised, scale = reference(weight)
    names = [spec.name for spec in ABSORBED]
    return weight, output, dict(zip(names, (quantised, scale, output), strict=True))


@pytest.mark.parametrize("bound", [False, True], ids=["made_anew", "copied_over"])
@pytest.mark.parametrize("mode", UpdateMode)
def test_projections_absorbed_from_float8_follow_a_trainer_in_bfloat16(
    mode: UpdateMode, bound: bool, tmp_path: Path
) -> None:
    engine = Absorbed(bound=bound)
    engine.load(copies(absorbed_checkpoint(1)[2]))
    start = absorbed_checkpoint(1)[2]
    captured = capture(
        engine, ABSORBED, engine.load, worker="engine/0", reference=stored(tmp_path, start)
    )
    assert sources(captured) == {spec.name for spec in ABSORBED[:2]}
    assert {"w_kc", "w_vc"} <= set(captured.recomputed)
    assert captured.manifest.quantized == (
        QuantizedTensor("a.kv_b.weight", "a.kv_b.weight_scale_inv"),
    )
    assert captured.recompute is not None
    buffers = [buffer for _, buffer in captured.recompute.buffers]
    weight, output, checkpoint = absorbed_checkpoint(2)
    builder = ManifestBuilder("trainer/0", Role.TRAINER)
    for name, tensor in (("a.kv_b.weight", weight), ("a.o.weight", output)):
        shape = tuple(tensor.shape)
        builder.add_parameter(name, nbytes=tensor.nbytes, dtype=DType.BFLOAT16)
        builder.add_shard(name, shape, Box((0, 0), shape), name)
    memory = {engine.o.data_ptr(): engine.o.data, **{b.data_ptr(): b for b in buffers}}
    received = Rank(captured.manifest, [memory[address] for address in captured.addresses])
    update([Rank(builder.build(), [weight, output])], [received], mode, 0)
    captured.finalise()
    fresh = Absorbed(bound=bound)
    fresh.load(copies(checkpoint))
    require_equal(engine, fresh)
    for have, want in ((engine.w_kc, fresh.w_kc), (engine.w_vc, fresh.w_vc)):
        assert have is not None
        assert want is not None
        assert have.stride() == want.stride()
        assert torch.equal(have, want)


def test_buffers_contain_the_checkpoint_of_the_engines_start(tmp_path: Path) -> None:
    start = values(SPECS, 1)
    engine = Engine()
    engine.load(copies(start))
    before = bytes_of(engine)
    captured = capture(engine, SPECS, engine.load, worker="e/0", reference=stored(tmp_path, start))
    assert captured.recompute is not None
    for spec, buffer in captured.recompute.buffers:
        assert torch.equal(buffer.reshape(spec.shape), start[spec.name])
    captured.finalise()
    for name, tensor in bytes_of(engine).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda state, given: given["w"] + len(state), "differently in two equal loads"),
        (
            lambda state, given: (given["w"] * 0.1).floor() + 3,
            "other checkpoint values do not change them",
        ),
    ],
    ids=["differs_with_every_load", "random_values_do_not_show"],
)
def test_a_tensor_that_no_load_reproduces_is_refused_by_name(
    compute: Callable[[list[int], dict[str, torch.Tensor]], torch.Tensor],
    message: str,
    tmp_path: Path,
) -> None:
    engine, state = torch.nn.Linear(4, 4, bias=False), list[int]()

    def load(weights: Weights) -> None:
        state.append(0)
        engine.weight.data.copy_(compute(state, {n: t.abs() for n, t in weights}))

    start = {"w": torch.rand(4, 4) * 100}
    load(copies(start))
    with pytest.raises(UnsupportedLayout, match=rf"weight.*{message}"):
        capture(
            engine, [CheckpointSpec("w", (4, 4), DType.FLOAT32)], load, worker="e/0",
            reference=stored(tmp_path, start),
        )  # fmt: skip


def test_a_loader_that_restores_its_own_copies_gets_all_of_their_sources() -> None:
    engine = Named({"norm": (4,), "count": (4,), "other": (4,)})
    specs = [CheckpointSpec(name, (4,), DType.FLOAT32) for name in ("count", "norm", "other")]
    kept: dict[str, torch.Tensor] = {}

    def load(weights: Weights) -> None:
        given = dict(weights)
        kept.update({name: tensor for name, tensor in given.items() if name != "other"})
        engine["count"].copy_(kept["count"])
        engine["norm"].copy_(kept["norm"] + 1)
        if "other" in given:
            engine["other"].copy_(given["other"])

    captured = capture(engine, specs, load, worker="e/0")
    assert sources(captured) == {"norm", "count"}
    deliver(captured, (checkpoint := values(specs, 6)))
    assert torch.equal(engine["count"], checkpoint["count"])
    assert torch.equal(engine["norm"], checkpoint["norm"] + 1)


def test_a_loader_that_moves_an_updated_tensor_fails_the_update() -> None:
    engine = Engine()
    captured = capture(engine, SPECS, engine.load, worker="e/0")
    proj = engine.rows[2].proj
    proj.data = proj.data.clone()
    with pytest.raises(UnsupportedLayout, match=r"layers.2.proj.*has moved"):
        captured.finalise()


def test_a_failing_loader_fails_the_update() -> None:
    engine, failing = Engine(), list[bool]()

    def load(weights: Weights) -> None:
        if failing:
            raise RuntimeError("no such layer")
        engine.load(weights)

    captured = capture(engine, SPECS, load, worker="e/0")
    failing.append(True)
    with pytest.raises(UnsupportedLayout, match="loader failed: RuntimeError: no such layer"):
        captured.finalise()


def test_computed_tensors_are_refused_where_no_loader_can_be_called() -> None:
    engine = Engine()
    with pytest.raises(UnsupportedLayout, match=r"decay.*cannot compute them again"):
        capture(engine, SPECS, engine.load, worker="e/0", recompute=False)


RULES: dict[str, Callable[[dict[str, torch.Tensor], str], torch.Tensor]] = {
    "copy": lambda given, name: given[name],
    "plus": lambda given, name: given[name] + 1,
    "exp": lambda given, name: -torch.exp(given[name]),
    "neighbour": lambda given, name: given[name] * given[f"{name[0]}.{(int(name[2:]) + 1) % 6}"],
    "sum": lambda given, name: sum((given[f"{name[0]}.{i}"] for i in range(6)), given[name]),
    "other": lambda given, name: given[f"{'ba'[name[0] == 'b']}.{name[2:]}"] - given[name],
}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(sorted(RULES)), min_size=12, max_size=12), st.booleans())
def test_any_mixture_of_copies_and_computed_tensors_is_updated(
    rules: list[str], waits: bool
) -> None:
    """Check loaders that wait for all sources of a tensor (`waits`) or reuse older sources."""
    names = [f"{kind}.{i}" for kind in "ab" for i in range(6)]
    specs = [CheckpointSpec(name, (3,), DType.FLOAT32) for name in names]

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = torch.nn.ParameterDict(
                {name.replace(".", "_"): torch.nn.Parameter(torch.zeros(3)) for name in names}
            )
            self.last: dict[str, torch.Tensor] = {}

        def load(self, weights: Weights) -> None:
            given = dict(weights)
            if not waits:
                self.last.update(given)
                given = dict(self.last)
            for name, rule in zip(names, rules, strict=True):
                try:
                    value = RULES[rule](given, name)
                except KeyError:
                    continue
                self.made[name.replace(".", "_")].data.copy_(value)

    fresh, engine = Mixed(), Mixed()
    captured = capture(engine, specs, engine.load, worker="e/0")
    assert (captured.recompute is None) == (set(rules) == {"copy"})
    for seed in (1, 2):
        deliver(captured, values(specs, seed))
        fresh.load(copies(values(specs, seed)))
        require_equal(engine, fresh)


def test_the_search_finds_exactly_the_sources_of_computed_tensors() -> None:
    codes = Codes([CheckpointSpec(f"l.{i}.{k}", (2,), DType.FLOAT32) for i in range(9) for k in "xyz"])  # fmt: skip
    held: dict[str, torch.Tensor] = {}

    def load(weights: Weights) -> None:
        given = dict(weights)
        held["one"] = given["l.3.x"] * given["l.3.y"]
        held["two"] = given["l.7.y"] + 1

    def prints() -> dict[str, int]:
        return {name: hash(tuple(tensor.tolist())) for name, tensor in held.items()}

    load(codes.random(0))
    assert {"l.3.x", "l.3.y", "l.7.y"} <= Search(codes, load, prints, prints()).sources()
    assert Search(codes, load, prints, prints()).sources() <= {"l.3.x", "l.3.y", "l.7.x", "l.7.y"}


class Fleeting:
    """One rank of an engine in a fleet."""

    def __init__(
        self, name: str, checkpoint: Path, model: Engine | Buffering | None = None
    ) -> None:
        self.name, self.checkpoint = name, checkpoint
        self.model = Engine() if model is None else model
        self.model.load(StoredCheckpoint(checkpoint).tensors())
        self.engine_rank = EngineRank()
        self.api = Api(self.engine_rank.gate)
        self.loads = 0

    def _load(self, weights: Weights) -> None:
        self.loads += 1
        self.model.load(weights)

    def _capture(self) -> Captured:
        return capture(
            self.model,
            checkpoint_specs(self.checkpoint),
            self._load,
            worker=f"{self.name}/0",
            reference=StoredCheckpoint(self.checkpoint),
        )

    def join(self, url: str) -> None:
        told = AgentSettings(
            name=self.name, controller=url, transport="cma", url="http://engine", world_size=1,
            checkpoint=str(self.checkpoint),
        )  # fmt: skip
        self.engine_rank.capture(told, 0, self._capture, lambda: self.api)
        self.engine_rank.join(told, 0, TOKEN)

    def leave(self) -> None:
        self.engine_rank.leave(10.0)
        # The test process continues without an engine.
        gc.unfreeze()


def publish(trainer: torch.nn.Module, url: str, version: int) -> None:
    with windlass.connect_trainer(trainer, controller=url, token=TOKEN) as client:
        assert client.publish(version).result().digest_ok


def trainer_of(held: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module with the names of the checkpoint."""
    trainer = torch.nn.Module()
    trainer.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(LAYERS))
    for name, tensor in held.items():
        _, index, kind = name.split(".")
        trainer.layers[int(index)].register_parameter(kind, torch.nn.Parameter(tensor))
    return trainer


@pytest.mark.parametrize("mode", UpdateMode)
async def test_a_newcomer_computes_the_same_tensors_as_the_fleet(
    mode: UpdateMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    save_file(values(SPECS, 1), tmp_path / "model.safetensors")
    first, late, fresh = Fleeting("first", tmp_path), Fleeting("late", tmp_path), Engine()
    async with windlass.Controller(token=TOKEN, config=ControlConfig(mode=mode)) as controller:
        await asyncio.to_thread(first.join, controller.url)
        for version in (1, 2):
            trainer = trainer_of(masters(SPECS, 10 + version))
            await asyncio.to_thread(publish, trainer, controller.url, version)
            fresh.load(copies(values(SPECS, 10 + version)))
            require_equal(first.model, fresh)
        everyone = asyncio.Event()

        def look() -> None:
            if len(controller.coordinator.routable()) == 2:
                everyone.set()

        controller.coordinator.subscribe(look)
        await asyncio.to_thread(late.join, controller.url)
        async with asyncio.timeout(120):
            await everyone.wait()
        require_equal(late.model, fresh)
    first.leave()
    late.leave()


class Stuck(Api):
    """API of an engine that does not pause while `fails` is set."""

    fails = True

    def pause(self, mode: PauseMode, deadline_s: float) -> bool:
        if self.fails:
            raise PeerTimeout("it does not come to rest")
        return True


@pytest.mark.parametrize("mode", UpdateMode)
async def test_an_aborted_update_never_calls_the_loader(
    mode: UpdateMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    save_file(values(SPECS, 1), tmp_path / "model.safetensors")
    engine, fresh = Fleeting("engine", tmp_path), Engine()
    engine.api = stuck = Stuck(engine.engine_rank.gate)
    before = bytes_of(engine.model)
    async with windlass.Controller(token=TOKEN, config=ControlConfig(mode=mode)) as controller:
        await asyncio.to_thread(engine.join, controller.url)
        loads = engine.loads
        with pytest.raises(WindlassError):
            await asyncio.to_thread(publish, trainer_of(masters(SPECS, 2)), controller.url, 1)
        assert engine.loads == loads
        for name, tensor in bytes_of(engine.model).items():
            assert torch.equal(tensor, before[name]), name
        stuck.fails = False
        await asyncio.to_thread(publish, trainer_of(masters(SPECS, 3)), controller.url, 2)
        assert engine.loads == loads + 1
        fresh.load(copies(values(SPECS, 3)))
        require_equal(engine.model, fresh)
    engine.leave()


class Buffering(torch.nn.Module):
    """An engine that, like vLLM, keeps the tensors of a layer until they have as many elements as the layer.

    It then writes them and drops later tensors of this layer. After a failed load, the kept tensors stay.
    """

    def __init__(self, kept: dict[int, list[tuple[str, torch.Tensor]]] | None = None) -> None:
        super().__init__()
        self.rows = [Layer(HEADS) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(self.rows)
        self.kept: dict[int, list[tuple[str, torch.Tensor]]] = {} if kept is None else kept
        self.failing_at = -1

    def load(self, weights: Weights) -> None:
        kept, complete = self.kept, set[int]()
        for number, (name, tensor) in enumerate(weights):
            if number == self.failing_at:
                raise RuntimeError("out of memory")
            index, kind = int(name.split(".")[1]), name.split(".")[2]
            if index in complete:
                continue
            kept.setdefault(index, []).append((kind, tensor))
            if sum(t.numel() for _, t in kept[index]) >= HEADS + HIDDEN:
                given = dict(kept.pop(index))
                layer, left_over = self.rows[index], torch.full((HEADS + HIDDEN,), 77.0)
                layer.decay.copy_(-torch.exp(given.get("A_log", left_over[:HEADS]).float()))
                layer.norm.copy_(given.get("norm", left_over[:HIDDEN]) + 1.0)
                complete.add(index)
        kept.clear()


BUFFERED = [s for s in SPECS if s.name.split(".")[2] in ("A_log", "norm")]
KEPT_ELSEWHERE: dict[int, list[tuple[str, torch.Tensor]]] = {}


def requires_no_grad(model: Buffering) -> Buffering:
    for row in model.rows:
        for unused in ("skip", "proj"):
            delattr(row, unused)
        del row.folded
        row.requires_grad_(False)
    return model


@pytest.mark.parametrize("where", ["model", "elsewhere"])
def test_leftovers_of_a_failed_load_do_not_reach_the_next_version(where: str) -> None:
    KEPT_ELSEWHERE.clear()
    engine = requires_no_grad(Buffering(KEPT_ELSEWHERE if where == "elsewhere" else None))
    fresh = requires_no_grad(Buffering())
    captured = capture(engine, BUFFERED, engine.load, worker="e/0")
    assert sources(captured) == {spec.name for spec in BUFFERED}
    for failing_at in range(len(BUFFERED)):
        engine.failing_at = failing_at
        with pytest.raises(UnsupportedLayout, match="out of memory"):
            deliver(captured, values(BUFFERED, 2 * failing_at))
        engine.failing_at = -1
        checkpoint = values(BUFFERED, 2 * failing_at + 1)
        deliver(captured, checkpoint)
        fresh.load(copies(checkpoint))
        require_equal(engine, fresh)


def test_a_loader_that_never_recovers_fails_every_update() -> None:
    """Check a loader that keeps state of a failed load. A fleet leaves its engine out."""
    engine = Engine()
    state = {"fails": False, "offset": 0.0}

    def load(weights: Weights) -> None:
        engine.load(weights)
        if state["fails"]:
            state["offset"] = 1.0
            raise RuntimeError("interrupted")
        for row in engine.rows:
            row.decay.data += state["offset"]
        state["offset"] *= 2

    captured = capture(engine, SPECS, load, worker="e/0")
    state["fails"] = True
    with pytest.raises(UnsupportedLayout, match="interrupted"):
        deliver(captured, values(SPECS, 4))
    state["fails"] = False
    for seed in (5, 6):
        with pytest.raises(UnsupportedLayout, match=r"decay.*gives these tensors other bytes"):
            deliver(captured, values(SPECS, seed))


def test_a_loader_that_writes_an_updated_tensor_after_a_failure_is_detected() -> None:
    engine = Engine()
    state = {"fails": False, "stale": False}

    def load(weights: Weights) -> None:
        engine.load(weights)
        if state["fails"]:
            state["stale"] = True
            raise RuntimeError("interrupted")
        if state["stale"]:
            engine.rows[1].proj.data.zero_()

    captured = capture(engine, SPECS, load, worker="e/0")
    state["fails"] = True
    with pytest.raises(UnsupportedLayout, match="interrupted"):
        deliver(captured, values(SPECS, 4))
    state["fails"] = False
    with pytest.raises(
        UnsupportedLayout, match=r"layers.1.proj.*has changed them after an earlier failure"
    ):
        deliver(captured, values(SPECS, 5))


@pytest.mark.parametrize(
    ("harm", "message"),
    [("leaves", r"layers.3.decay.*has not written"), ("stops", r"layers.4.scale.*has not read")],
)
def test_a_loader_that_silently_skips_a_tensor_fails_the_update(harm: str, message: str) -> None:
    engine, harmed = Engine(), list[bool]()

    def load(weights: Weights) -> None:
        if not harmed:
            engine.load(weights)
        elif harm == "leaves":
            # The engine keeps the old values. vLLM does this with a warning.
            engine.load((n, t) for n, t in weights if n != "layers.3.A_log")
        else:
            engine.load((n, t) for n, t in zip_without(weights, "layers.4.scale"))

    def zip_without(weights: Weights, last: str) -> Weights:
        for spec in (s for s in SPECS if s.name in COMPUTED_FROM and s.name != last):
            name, tensor = next(weights)
            assert name == spec.name
            yield name, tensor
        yield last, torch.ones(1).bfloat16()

    captured = capture(engine, SPECS, load, worker="e/0")
    deliver(captured, values(SPECS, 3))
    harmed.append(True)
    with pytest.raises(UnsupportedLayout, match=message):
        deliver(captured, values(SPECS, 4))


def test_elements_that_no_load_writes_stay_unchanged() -> None:
    engine = Named({"padded": (4, 6), "sum": (3,)})
    specs = [CheckpointSpec("a", (3, 5), DType.FLOAT32), CheckpointSpec("b", (3,), DType.FLOAT32)]
    engine["padded"].fill_(0.125)

    def load(weights: Weights) -> None:
        given = dict(weights)
        if "a" in given:
            engine["padded"][:3, :5] = given["a"] + 1
        if "b" in given:
            # The loader reads the tensor that it overwrites.
            engine["sum"].copy_(engine["sum"] * 0 + given["b"] * 3)

    captured = capture(engine, specs, load, worker="e/0")
    for seed in (1, 2):
        checkpoint = values(specs, seed)
        deliver(captured, checkpoint)
        assert torch.equal(engine["padded"][:3, :5], checkpoint["a"] + 1)
        assert bool((engine["padded"][3] == 0.125).all())
        assert bool((engine["padded"][:, 5] == 0.125).all())
        assert torch.equal(engine["sum"], checkpoint["b"] * 3)


@pytest.mark.parametrize("mode", UpdateMode)
async def test_a_version_published_after_a_failed_load_is_right(
    mode: UpdateMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    save_file(values(BUFFERED, 1), tmp_path / "model.safetensors")
    KEPT_ELSEWHERE.clear()
    engine = Fleeting("engine", tmp_path, requires_no_grad(Buffering(KEPT_ELSEWHERE)))
    fresh, model = requires_no_grad(Buffering()), engine.model
    assert isinstance(model, Buffering)
    async with windlass.Controller(token=TOKEN, config=ControlConfig(mode=mode)) as controller:
        await asyncio.to_thread(engine.join, controller.url)
        await asyncio.to_thread(publish, trainer_of(masters(BUFFERED, 2)), controller.url, 1)
        model.failing_at = 5
        with pytest.raises(WindlassError, match="out of memory"):
            await asyncio.to_thread(publish, trainer_of(masters(BUFFERED, 3)), controller.url, 2)
        model.failing_at = -1
        await asyncio.to_thread(publish, trainer_of(masters(BUFFERED, 4)), controller.url, 3)
        fresh.load(copies(values(BUFFERED, 4)))
        require_equal(model, fresh)
    engine.leave()
