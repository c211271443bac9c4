"""After an update an engine answers like a fresh engine, wherever it keeps values that it derives from weights.

Every case is a two-layer engine with its own loader. The oracle is a second engine that loads the new checkpoint. The tests
compare answers only, so the oracle does not depend on capture's view of an engine.
"""

from __future__ import annotations

import asyncio
import operator
import sys
import threading
import weakref
from array import array
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from contextvars import ContextVar
from copy import copy
from ctypes import c_float
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from itertools import repeat
from mmap import mmap
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from queue import Queue, SimpleQueue
from tempfile import TemporaryFile
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_capture import deliver
from test_engine_rank import Api

import windlass
from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.engines.capture.capture import capture
from windlass.engines.capture.checkpoint import StoredCheckpoint, checkpoint_specs
from windlass.engines.capture.description import Captured
from windlass.engines.capture.memory import Watched
from windlass.engines.capture.reach import reach
from windlass.engines.capture.snapshot import undone_if_it_fails
from windlass.engines.engine_rank import EngineRank
from windlass.engines.spec import AgentSettings
from windlass.errors import UnsupportedLayout, WindlassError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:The PyTorch API of nested tensors is in prototype:UserWarning"
    ),
]

TOKEN = "secret of the test"
WIDTH, LAYERS = 24, 2
Weights = Iterator[tuple[str, torch.Tensor]]
Checkpoint = dict[str, torch.Tensor]
NAMES = [f"layers.{i}.{kind}" for i in range(LAYERS) for kind in ("norm", "w", "v")]


def checkpoint_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"norm": (WIDTH,), "w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}
    return {
        name: torch.randn(shapes[name.split(".")[2]], generator=generator).to(dtype)
        for name in NAMES
    }


X = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)

# Functions that derive a value from the weights of a layer.
Derive = Callable[["Layer"], torch.Tensor]
DERIVED: dict[str, Derive] = {
    "cast": lambda layer: layer.w.detach().float(),
    "copy": lambda layer: layer.w.detach().clone(),
    "transposed": lambda layer: layer.w.detach().float().T.contiguous(),
    "slice": lambda layer: layer.w.detach()[4:11].float(),
    "columns": lambda layer: layer.w.detach()[:, 3:9].clone(),
    "concatenation": lambda layer: torch.cat([layer.w.detach(), layer.v.detach()]).float(),
    "side_by_side": lambda layer: torch.cat([layer.w.detach(), layer.v.detach()], 1).float(),
    "norm": lambda layer: layer.norm.detach().float(),
    "joined_norm": lambda layer: torch.cat([layer.norm.detach().float(), layer.w.detach()[0].float()]),
    "double": lambda layer: layer.w.detach().double(),
    "narrow": lambda layer: layer.w.detach().to(torch.float8_e4m3fn),
    "product": lambda layer: layer.w.detach().float() * 1.5,
    "quantised": lambda layer: (layer.w.detach().float() / layer.w.detach().float().abs().max() * 448).to(torch.float8_e4m3fn),
    "plus_one": lambda layer: layer.norm.detach().float() + 1,
    "every_other": lambda layer: layer.w.detach()[::2].float(),
    "block": lambda layer: layer.w.detach()[2:9, 3:11].float(),
    "flat": lambda layer: layer.w.detach().float().reshape(-1),
    "flipped": lambda layer: layer.w.detach().flip(0).float(),
    "stacked": lambda layer: torch.stack([layer.w.detach(), layer.v.detach()]).float(),
    "padded": lambda layer: torch.nn.functional.pad(layer.w.detach().float(), (0, 0, 0, 8)),
    "permuted": lambda layer: layer.w.detach()[torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3))].float(),
    "integer": lambda layer: (layer.w.detach().float() * 30).round().clamp(-127, 127).to(torch.int8),
    "decay": lambda layer: -layer.norm.detach().float().exp(),
}  # fmt: skip
COPIES = [
    kind for kind in DERIVED if kind not in ("product", "quantised", "plus_one", "integer", "decay")
]


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: object) -> None:
        self.tensor = tensor


@dataclass
class Record:
    tensor: object


Pair = namedtuple("Pair", "first second")


class Method:
    """An object that the engine reaches only through a bound method."""

    def __init__(self, tensor: object) -> None:
        self.tensor = tensor

    def get(self) -> object:
        return self.tensor


class Hidden(torch.nn.Module):
    """A module that no other module registers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("tensor", tensor)


class HiddenParameter(torch.nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = torch.nn.Parameter(tensor, requires_grad=False)


GLOBALS: dict[tuple[int, int], object] = {}


class OfClass:
    """State of a class."""

    held: dict[tuple[int, int], object] = {}  # noqa: RUF012


def closed_over(tensor: object) -> Callable[[], object]:
    return lambda: tensor


def by_default(tensor: object) -> Callable[[], object]:
    def get(tensor: object = tensor) -> object:
        return tensor

    return get


def by_keyword(tensor: object) -> Callable[[], object]:
    def get(*, tensor: object = tensor) -> object:
        return tensor

    return get


def of_function(tensor: object) -> Callable[[], object]:
    def get() -> object:
        return vars(get)["tensor"]

    vars(get)["tensor"] = tensor
    return get


def cached(tensor: object) -> Callable[[], object]:
    found = [tensor]

    @lru_cache
    def get() -> object:
        return found.pop()

    get()
    return get


def generated(tensor: object) -> Iterator[object]:
    def steps() -> Iterator[object]:
        held = tensor
        while True:
            yield held

    return steps()


def queued(kind: Any) -> Callable[[object], Any]:
    def put(tensor: object) -> Any:
        made = kind()
        made.put(tensor)
        return made

    return put


def first_of(held: Any) -> Any:
    """Return the value in a queue, and keep it there."""
    found = held.get()
    held.put(found)
    return found


def of_future(tensor: object) -> Future[object]:
    made: Future[object] = Future()
    made.set_result(tensor)
    return made


def of_context(tensor: object) -> ContextVar[object]:
    made: ContextVar[object] = ContextVar("made")
    made.set(tensor)
    return made


def of_thread(tensor: object) -> threading.local:
    made = threading.local()
    made.tensor = tensor
    return made


def of_objects(tensor: object) -> Any:
    made = np.empty(2, dtype=object)
    made[1] = tensor
    return made


@dataclass(frozen=True)
class Holder:
    """Functions that put a value into an object, and get it from there."""

    keep: Callable[[Any], object]
    get: Callable[[Any], Any]


HOLDERS = {
    "attribute": Holder(lambda t: t, lambda k: k),
    "dict": Holder(lambda t: {"w": t}, lambda k: k["w"]),
    "ordered_dict": Holder(lambda t: OrderedDict(w=t), lambda k: k["w"]),
    "user_dict": Holder(lambda t: UserDict(w=t), lambda k: k["w"]),
    "list": Holder(lambda t: [None, t], lambda k: k[1]),
    "deque": Holder(lambda t: deque([t]), lambda k: k[0]),
    "tuple": Holder(lambda t: (1, t), lambda k: k[1]),
    "namedtuple": Holder(lambda t: Pair(1, t), lambda k: k.second),
    "set": Holder(lambda t: {t}, lambda k: next(iter(k))),
    "dataclass": Holder(Record, lambda k: k.tensor),
    "slots": Holder(Slotted, lambda k: k.tensor),
    "namespace": Holder(lambda t: SimpleNamespace(tensor=t), lambda k: k.tensor),
    "nested": Holder(
        lambda t: {"a": [Record((Slotted(partial(Record, tensor=t)),))]},
        lambda k: k["a"][0].tensor[0].tensor.keywords["tensor"],
    ),
    "partial": Holder(lambda t: partial(torch.mul, t), lambda k: k.args[0]),
    "partial_keyword": Holder(lambda t: partial(torch.mul, other=t), lambda k: k.keywords["other"]),
    "closure": Holder(closed_over, lambda k: k()),
    "default": Holder(by_default, lambda k: k()),
    "keyword_default": Holder(by_keyword, lambda k: k()),
    "function_attribute": Holder(of_function, lambda k: k()),
    "lru_cache": Holder(cached, lambda k: k()),
    "bound_method": Holder(lambda t: Method(t).get, lambda k: k()),
    "hidden_module": Holder(Hidden, lambda k: (lambda: k.get_buffer("tensor"))()),
    "module_in_list": Holder(lambda t: [Hidden(t)], lambda k: k[0].get_buffer("tensor")),
    "hidden_parameter": Holder(lambda t: [HiddenParameter(t)], lambda k: k[0].tensor.data),
    "parameters_in_list": Holder(
        lambda t: [torch.nn.Parameter(t, requires_grad=False)], lambda k: k[0].data
    ),
    "generator": Holder(generated, next),
    "queue": Holder(queued(Queue), first_of),
    "simple_queue": Holder(queued(SimpleQueue), first_of),
    "future": Holder(of_future, lambda k: k.result()),
    "context_variable": Holder(of_context, lambda k: k.get()),
    "thread_local": Holder(of_thread, lambda k: k.tensor),
    "object_array": Holder(of_objects, lambda k: k[1]),
    "mapping_proxy": Holder(lambda t: MappingProxyType({"w": t}), lambda k: k["w"]),
    "values_of_dict": Holder(lambda t: {"w": t}.values(), lambda k: next(iter(k))),
    "iterator": Holder(lambda t: iter([t, t]), lambda k: copy(k).__next__()),
    "map": Holder(lambda t: map(torch.clone, repeat(t)), next),
    "c_method": Holder(lambda t: t.clone, lambda k: k()),
    "sparse": Holder(lambda t: t.float().to_sparse(), lambda k: k.to_dense()),
    "sparse_rows": Holder(lambda t: t.float().reshape(1, -1).to_sparse_csr(), lambda k: k.to_dense()),
    "nested_tensor": Holder(
        lambda t: torch.nested.nested_tensor([t, t[:2]]), lambda k: k.unbind()[0]
    ),
    "jagged": Holder(
        lambda t: torch.nested.nested_tensor([t, t[:2]], layout=torch.jagged), lambda k: k.unbind()[0]
    ),
    "storage": Holder(
        lambda t: (t.dtype, t.untyped_storage()), lambda k: torch.empty(0, dtype=k[0]).set_(k[1])
    ),
    "bytes": Holder(
        lambda t: bytearray(t.float().numpy().tobytes()), lambda k: torch.frombuffer(k, dtype=torch.float32)
    ),
    "numpy": Holder(lambda t: t.float().numpy().copy(), torch.from_numpy),
    "numpy_in_dict": Holder(lambda t: {"w": t.float().numpy().copy()}, lambda k: torch.from_numpy(k["w"])),
}  # fmt: skip


class Layer(torch.nn.Module):
    w: torch.nn.Parameter
    v: torch.nn.Parameter
    norm: torch.nn.Parameter

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in (("norm", (WIDTH,)), ("w", (WIDTH, WIDTH)), ("v", (WIDTH, WIDTH))):
            made = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            self.register_parameter(name, made)


class Engine(torch.nn.Module):
    """An engine that derives a value from each layer's weights and uses it in its answers.

    Args:
        derive: computes the value. holder: keeps it.
        when: `load`, in every load; `cold`, once at the end of the start; `lazy`, at the first forward pass.
    """

    def __init__(
        self, derive: Derive, holder: Holder, when: str, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.derive, self.holder, self.when = derive, holder, when
        self.rows = [Layer(dtype) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(self.rows)

    def load(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        if self.when == "load":
            self.keep()

    def keep(self) -> None:
        for layer in self.rows:
            vars(layer)["kept"] = self.holder.keep(self.derive(layer))

    def start(self, checkpoint: Checkpoint) -> None:
        self.load((name, tensor.clone()) for name, tensor in checkpoint.items())
        if self.when == "cold":
            self.keep()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.rows:
            if "kept" not in vars(layer):
                vars(layer)["kept"] = self.holder.keep(self.derive(layer))
            kept = self.holder.get(vars(layer)["kept"])
            value = kept.float() if isinstance(kept, torch.Tensor) else torch.tensor(float(kept))
            x = x @ layer.w.float() @ layer.v.float() * layer.norm.float() / WIDTH
            x = torch.tanh(x) + torch.tanh(value.sum()) + value.reshape(-1)[-WIDTH:].square().sum()
        return x


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent capture from collecting and freezing the heap of the test process."""
    monkeypatch.setattr("windlass.engines.engine_rank.freeze_heap", lambda: None)


class Rank:
    """One rank of an engine, with capture and with updates as the agent makes them."""

    def __init__(self, folder: Path, model: torch.nn.Module, *, referred: bool = True) -> None:
        self.folder, self.model, self.referred = folder, model, referred
        self.engine_rank = EngineRank()
        self.api = Api(self.engine_rank.gate)
        self.loads = 0

    def _load(self, weights: Weights) -> None:
        self.loads += 1
        self.model.load(weights)  # type: ignore[operator]

    def _capture(self) -> Captured:
        return capture(
            self.model,
            checkpoint_specs(self.folder),
            self._load,
            worker="engine/0",
            reference=StoredCheckpoint(self.folder) if self.referred else None,
        )

    def capture(self, url: str = "http://controller") -> AgentSettings:
        settings = AgentSettings(
            name="engine", controller=url, transport="cma", url="http://engine", world_size=1,
            checkpoint=str(self.folder),
        )  # fmt: skip
        self.engine_rank.capture(settings, 0, self._capture, lambda: self.api)
        return settings

    def update(self, checkpoint: Checkpoint) -> None:
        """Pause, write, finalise and resume, as the agent does. A pause that refuses leaves all bytes unchanged."""
        _, captured, hooks = self.engine_rank.required()
        hooks.pause("1.1", PauseMode.IN_PLACE, 10)
        try:
            finalise = captured.finalise
            deliver(Written(captured), checkpoint)  # type: ignore[arg-type]
            assert finalise is not None
            hooks.finalise()
        finally:
            hooks.resume(10)


class Written:
    """A layout for `deliver`, without its own `finalise`."""

    def __init__(self, captured: Captured) -> None:
        self.manifest, self.addresses = captured.manifest, captured.addresses

    def finalise(self) -> None:
        pass


def require_right(
    folder: Path,
    engine: Callable[[], Engine],
    *,
    served_before: bool = False,
    refused: str = "",
    dtype: torch.dtype = torch.bfloat16,
) -> Rank:
    """Update an engine twice and compare its answers with a fresh engine's, or expect a refusal that names this path."""
    start = checkpoint_of(1, dtype)
    save_file(start, folder / "model.safetensors")
    live = engine()
    live.start(start)
    if served_before:
        live(X)
    rank = Rank(folder, live)
    before = live(X) if served_before else None
    outcome = ""
    try:
        rank.capture()
        first = live(X).clone()
        if before is not None:
            assert torch.equal(first, before), "capture leaves the engine as it was"
        for seed in (2, 3):
            checkpoint = checkpoint_of(seed, dtype)
            rank.update(checkpoint)
            fresh = engine()
            fresh.start(checkpoint)
            answer, expected = live(X), fresh(X)
            assert not torch.equal(answer, first)
            assert torch.equal(answer, expected), (answer - expected).abs().max()
    except UnsupportedLayout as error:
        outcome = str(error)
        if before is not None:
            assert torch.equal(live(X), before), "a refusal leaves the engine as it was"
    assert bool(outcome) == bool(refused), outcome
    assert refused in outcome
    return rank


@pytest.mark.parametrize("holder", HOLDERS)
def test_derived_state_is_right_in_every_kind_of_holder(holder: str, tmp_path: Path) -> None:
    derived = ("cast", "product")[[*HOLDERS].index(holder) % 2]
    require_right(tmp_path, lambda: Engine(DERIVED[derived], HOLDERS[holder], "load"))


def floats(tensor: torch.Tensor) -> Any:
    return tensor.float().numpy().copy()


def of_file(tensor: torch.Tensor) -> Any:
    """Return a read-only array whose memory the process cannot write."""
    with TemporaryFile() as file:
        file.write(floats(tensor).tobytes())
        return np.memmap(file, dtype=np.float32, mode="r", shape=tuple(tensor.shape))


def read_only(tensor: torch.Tensor) -> Any:
    made = floats(tensor)
    made.setflags(write=False)
    return made


def in_fields(tensor: torch.Tensor) -> Any:
    made = np.zeros(tuple(tensor.shape), [("row", np.int32), ("w", np.float32)])
    made["w"] = floats(tensor)
    return made


def of_gradient(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.nn.Parameter(torch.zeros_like(tensor))
    made.grad = tensor
    return made


class WithLock:
    """A cache that several threads use."""

    def __init__(self, tensor: object) -> None:
        self.lock, self.held = threading.Lock(), {"w": tensor}


def torch_of(made: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(made))


UNUSUAL = {
    "with_lock": Holder(WithLock, lambda k: k.held["w"]),
    "method_caller": Holder(lambda t: operator.methodcaller("mul", t), lambda k: k(torch.tensor(1.0))),
    "set_iterator": Holder(lambda t: iter({t}), lambda k: next(copy(k))),
    "context": Holder(nullcontext, lambda k: k.enter_result),
    "distribution": Holder(lambda t: torch.distributions.Normal(t, 1.0), lambda k: k.loc),
    "gradient": Holder(of_gradient, lambda k: k.grad),
    "array": Holder(lambda t: array("f", floats(t).ravel()), lambda k: torch.tensor(list(k))),
    "view_of_array": Holder(lambda t: memoryview(floats(t)), torch_of),
    "fields": Holder(in_fields, lambda k: torch_of(k["w"])),
    "backwards": Holder(lambda t: floats(t)[::-1], torch_of),
    "read_only": Holder(read_only, torch_of),
    "bits": Holder(lambda t: t.bfloat16().view(torch.int16).clone(), lambda k: k.view(torch.bfloat16)),
    "bits_of_array": Holder(lambda t: floats(t).view(np.int32), lambda k: torch_of(k.view(np.float32))),
    "expanded": Holder(lambda t: t.float().expand(2, WIDTH, WIDTH), lambda k: k[1]),
}  # fmt: skip


def mapped(tensor: torch.Tensor) -> mmap:
    made = mmap(-1, tensor.nbytes)
    made.write(floats(tensor).tobytes())
    return made


def in_shared_memory(tensor: torch.Tensor) -> SharedMemory:
    made = SharedMemory(create=True, size=tensor.nbytes)
    assert made.buf is not None
    made.buf[:] = floats(tensor).tobytes()
    made.unlink()
    return made


def of_torch_future(tensor: torch.Tensor) -> Any:
    made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    made.set_result(tensor)
    return made


ZERO = torch.zeros(WIDTH, WIDTH)


class Adding(torch.nn.Module):
    """A module for compilers; it adds a constant."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(tensor, requires_grad=False)
        self.twice = tensor.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight / 2 + self.twice / 2


def traced(tensor: torch.Tensor) -> Any:
    return torch.jit.trace(lambda x: x + tensor, (ZERO,))  # type: ignore[no-untyped-call]


def exported(tensor: torch.Tensor) -> Any:
    return torch.export.export(Adding(tensor), (ZERO,))


def numbers_in(made: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(made, np.float32).copy())


OF_C = {
    "mapped": Holder(mapped, numbers_in),
    "shared_memory": Holder(in_shared_memory, lambda k: numbers_in(k.buf)),
    "c_array": Holder(lambda t: (c_float * t.numel())(*t.flatten().tolist()), numbers_in),
    "bytes_io": Holder(lambda t: BytesIO(floats(t).tobytes()), lambda k: numbers_in(k.getvalue())),
    "torch_future": Holder(of_torch_future, lambda k: k.value()),
    "traced": Holder(traced, lambda k: k(ZERO)),
    "script": Holder(lambda t: torch.jit.script(Adding(t)), lambda k: k(ZERO)),
    "exported": Holder(exported, lambda k: k.module()(ZERO)),
}
PACKED = {
    "onednn": Holder(lambda t: t.float().to_mkldnn(), lambda k: k.to_dense()),
    "prepacked": Holder(
        lambda t: torch.ops.quantized.linear_prepack(quantised(t), None),
        lambda k: torch.ops.quantized.linear_dynamic(torch.eye(WIDTH), k),
    ),
}


def quantised(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor.float(), 0.02, 0, torch.qint8)


READ_ONLY = {
    "file": Holder(of_file, torch_of),
    "bytes": Holder(lambda t: floats(t).tobytes(), lambda k: torch_of(np.frombuffer(k, np.float32))),
    "byte_order": Holder(lambda t: floats(t).astype(">f4"), lambda k: torch_of(k.astype(np.float32))),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*non-leaf Tensor:UserWarning")
@pytest.mark.parametrize("when", ["cold", "lazy", "load"])
@pytest.mark.parametrize("holder", UNUSUAL)
def test_copies_in_unusual_holders_are_right(holder: str, when: str, tmp_path: Path) -> None:
    require_right(
        tmp_path,
        lambda: Engine(DERIVED["cast"], UNUSUAL[holder], when),
        served_before=when == "cold",
    )


@pytest.mark.parametrize("when", ["cold", "lazy", "load"])
@pytest.mark.parametrize("holder", READ_ONLY)
def test_copies_in_memory_that_cannot_be_written_are_refused(
    holder: str, when: str, tmp_path: Path
) -> None:
    require_right(
        tmp_path,
        lambda: Engine(DERIVED["cast"], READ_ONLY[holder], when),
        served_before=when == "cold",
        refused="kept",
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("when", ["cold", "lazy", "load"])
@pytest.mark.parametrize("holder", OF_C)
def test_copies_in_objects_of_c_are_right(holder: str, when: str, tmp_path: Path) -> None:
    require_right(
        tmp_path,
        lambda: Engine(DERIVED["cast"], OF_C[holder], when),
        served_before=when == "cold",
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("when", ["cold", "lazy", "load"])
@pytest.mark.parametrize("holder", PACKED)
def test_packed_copies_are_refused(holder: str, when: str, tmp_path: Path) -> None:
    require_right(tmp_path, lambda: Engine(DERIVED["cast"], PACKED[holder], when), refused="kept")


COMPUTED = {
    "quantised": Holder(quantised, lambda k: k.dequantize()),
    "frozen": Holder(
        lambda t: torch.jit.freeze(torch.jit.script(Adding(t).eval())), lambda k: k(ZERO)
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("when", ["cold", "lazy", "load"])
@pytest.mark.parametrize("holder", COMPUTED)
def test_computed_values_of_torch_are_right_or_refused(
    holder: str, when: str, tmp_path: Path
) -> None:
    """A walk ended the process at a quantised tensor."""
    refused = "" if when == "load" else "kept"
    require_right(
        tmp_path, lambda: Engine(DERIVED["cast"], COMPUTED[holder], when), refused=refused
    )


class InPlace(Engine):
    """An engine whose loader writes copies of weights into bytes that it has allocated once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(DERIVED["cast"], Holder(lambda t: t, numbers_in), "load")
        for layer in self.rows:
            vars(layer)["kept"] = make()

    def keep(self) -> None:
        for layer in self.rows:
            data = floats(self.derive(layer)).tobytes()
            memoryview(vars(layer)["kept"]).cast("B")[:] = data


@pytest.mark.parametrize("make", [bytearray, partial(mmap, -1)], ids=["bytes", "mapped"])
def test_bytes_that_a_loader_overwrites_are_right(make: Any, tmp_path: Path) -> None:
    require_right(tmp_path, lambda: InPlace(lambda: make(4 * WIDTH * WIDTH)), served_before=True)


class WithScript(Engine):
    """An engine with compiled modules as children."""

    def keep(self) -> None:
        for layer in self.rows:
            layer.kept = torch.jit.script(Adding(self.derive(layer)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.rows:
            x = x @ layer.w.float() + layer.get_submodule("kept")(ZERO).sum()
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("when", ["cold", "load"])
def test_a_compiled_child_module_is_refused_by_name(when: str, tmp_path: Path) -> None:
    require_right(
        tmp_path,
        lambda: WithScript(DERIVED["cast"], HOLDERS["attribute"], when),
        refused="kept.weight",
    )


@pytest.mark.parametrize("when", ["cold", "load"])
def test_a_tensor_with_the_negative_bit_is_right_or_refused(when: str, tmp_path: Path) -> None:
    negated = Holder(
        lambda t: torch.complex(t.float(), -t.float()).conj().imag, lambda k: k.resolve_neg()
    )
    refused = "kept" if when == "cold" else ""
    require_right(tmp_path, lambda: Engine(DERIVED["cast"], negated, when), refused=refused)


class Logging(Engine):
    """An engine that appends to a buffer of bytes in every forward pass and every load."""

    def __init__(self) -> None:
        super().__init__(DERIVED["cast"], HOLDERS["dict"], "load")
        self.log = bytearray(100)

    def load(self, weights: Weights) -> None:
        super().load(weights)
        self.log.extend(bytes(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.extend(bytes(1000))
        return super().forward(x)


def test_an_engine_may_resize_its_buffers_of_bytes(tmp_path: Path) -> None:
    require_right(tmp_path, Logging, served_before=True)


@pytest.mark.parametrize("derived", DERIVED)
def test_every_kind_of_derived_state_is_right(derived: str, tmp_path: Path) -> None:
    require_right(tmp_path, lambda: Engine(DERIVED[derived], HOLDERS["nested"], "load"))


@pytest.mark.parametrize("when", ["cold", "lazy"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_copies_that_no_load_refreshes_are_refilled_in_every_holder(
    holder: str, when: str, tmp_path: Path
) -> None:
    require_right(
        tmp_path, lambda: Engine(DERIVED["cast"], HOLDERS[holder], when), served_before=True
    )


@pytest.mark.parametrize("when", ["cold", "lazy_before", "lazy_after"])
@pytest.mark.parametrize("derived", DERIVED)
def test_state_that_no_load_refreshes_is_refilled_or_refused_by_its_path(
    derived: str, when: str, tmp_path: Path
) -> None:
    require_right(
        tmp_path,
        lambda: Engine(DERIVED[derived], HOLDERS["dict"], when.partition("_")[0]),
        served_before=when == "lazy_before",
        refused="" if derived in COPIES else "kept['w']",
    )


@pytest.mark.parametrize("holder", HOLDERS)
def test_copies_that_the_first_request_makes_after_joining_are_refilled(
    holder: str, tmp_path: Path
) -> None:
    require_right(tmp_path, lambda: Engine(DERIVED["cast"], HOLDERS[holder], "lazy"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("when", ["load", "cold", "lazy"])
def test_derived_state_of_other_engine_types_is_right(
    when: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    def narrow(layer: Layer) -> torch.Tensor:
        return layer.w.detach().bfloat16()

    require_right(tmp_path, lambda: Engine(narrow, HOLDERS["list"], when, dtype), dtype=dtype)


NUMBERS: dict[str, Callable[[Layer], Any]] = {
    "largest": lambda layer: float(layer.w.max()),
    "element": lambda layer: layer.w[1, 2].item(),
    "numpy_number": lambda layer: np.float32(layer.norm.float().sum().item()),
    "integer": lambda layer: int((layer.w > 0.05).sum()),
    "yes_or_no": lambda layer: bool(layer.w.max() > 1),
}


@pytest.mark.parametrize(
    ("number", "holder"),
    [*zip(NUMBERS, ["attribute", "dict", "tuple", "slots", "closure"], strict=True)],
)
def test_numbers_that_the_loader_derives_are_right(
    number: str, holder: str, tmp_path: Path
) -> None:
    require_right(tmp_path, lambda: Engine(NUMBERS[number], HOLDERS[holder], "load"))


@pytest.mark.parametrize(
    ("number", "number_is_refused"),
    [
        (lambda layer: float(layer.w.max() > 0.5), False),
        (lambda layer: int(layer.w.abs().max() > 10), True),
    ],
    ids=["some_values_show", "digits_show"],
)
def test_derived_numbers_with_few_values_are_right_or_refused(
    number: Callable[[Layer], Any], number_is_refused: bool, tmp_path: Path
) -> None:
    live = Engine(number, HOLDERS["dataclass"], "load")
    start = {n: t / 8 if n.endswith("w") else t for n, t in checkpoint_of(1).items()}
    save_file(start, tmp_path / "model.safetensors")
    live.start(start)
    rank = Rank(tmp_path, live)
    if number_is_refused:
        with pytest.raises(
            UnsupportedLayout, match=r"layers\.\*\.kept\.tensor.*most weight values do not change"
        ):
            rank.capture()
        return
    rank.capture()
    for scale in (1.0, 20.0, 0.125):
        checkpoint = {n: t * scale if n.endswith("w") else t for n, t in checkpoint_of(2).items()}
        rank.update(checkpoint)
        fresh = Engine(number, HOLDERS["dataclass"], "load")
        fresh.start(checkpoint)
        assert torch.equal(live(X), fresh(X))


class Counting(Engine):
    """An engine that counts its loads and records addresses."""

    count = 0

    def load(self, weights: Weights) -> None:
        super().load(weights)
        self.count += 1
        self.at = self.rows[0].w.data_ptr()
        self.stats = {"loads": self.count, "seconds": self.count * 0.25}
        self.is_loaded = True


def test_numbers_that_do_not_depend_on_weights_are_not_recomputed(tmp_path: Path) -> None:
    rank = require_right(tmp_path, lambda: Counting(DERIVED["cast"], HOLDERS["attribute"], "load"))
    assert rank.engine_rank.captured.recompute is None


@pytest.mark.parametrize("derived", DERIVED)
def test_counters_of_loads_are_accepted_with_every_derived_value(
    derived: str, tmp_path: Path
) -> None:
    # Capture observes some of these engines several times, and the counters differ between observations.
    require_right(tmp_path, lambda: Counting(DERIVED[derived], HOLDERS["attribute"], "load"))


def test_a_class_without_the_name_of_its_module_is_skipped(tmp_path: Path) -> None:
    # Classes of C extensions in SGLang have a descriptor as `__module__`.
    odd = type("Odd", (), {"__module__": property(lambda _: "of the object")})

    class Odd(Engine):
        def start(self, checkpoint: Checkpoint) -> None:
            super().start(checkpoint)
            self.odd, self.kind = [odd()], odd

    require_right(tmp_path, lambda: Odd(DERIVED["cast"], HOLDERS["dict"], "load"))


@lru_cache
def module_of(name: str) -> Any:
    return sys.modules[name]


def test_a_walk_does_not_enter_a_module_in_a_cache() -> None:
    # SGLang caches `torch.cuda` in this way. From there a walk would reach `sys.modules`.
    class Caching(Engine):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).to(module_of("torch").float32)

    engine = Caching(DERIVED["cast"], HOLDERS["attribute"], "load")
    engine.start(checkpoint_of(1))
    engine(X)
    assert len(reach(engine).nodes) < 100


class LoadingItems(dict[str, object]):
    """A dict that loads its items when it is read, like transformers' mapping of model classes."""

    def items(self) -> Any:
        raise AssertionError("the walk must not load the items")


def test_a_walk_does_not_call_methods_of_dicts() -> None:
    engine = Engine(DERIVED["cast"], HOLDERS["attribute"], "load")
    engine.start(checkpoint_of(1))
    held = engine.rows[0].w.detach().float()
    vars(engine)["names"] = LoadingItems(a=held)
    assert any(node.item is held for node in reach(engine).tensors)


class Asserting(Engine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == WIDTH
        return super().forward(x)


def test_a_walk_does_not_follow_the_asserts_that_pytest_rewrites() -> None:
    # pytest's replacement of an assert references its session, and so every collected test.
    engine = Asserting(DERIVED["cast"], HOLDERS["attribute"], "load")
    engine.start(checkpoint_of(1))
    packages = {type(node.item).__module__.partition(".")[0] for node in reach(engine).nodes}
    assert packages.isdisjoint({"_pytest", "pytest", "hypothesis"})


class Dropping(Engine):
    """An engine that drops the derived value in a load and makes it again in the next forward pass."""

    def load(self, weights: Weights) -> None:
        super().load(weights)
        for layer in self.rows:
            vars(layer).pop("kept", None)


@pytest.mark.parametrize("served_before", [False, True])
@pytest.mark.parametrize("derived", ["cast", "product"])
def test_state_that_a_load_drops_is_made_again_after_an_update(
    derived: str, served_before: bool, tmp_path: Path
) -> None:
    require_right(
        tmp_path,
        lambda: Dropping(DERIVED[derived], HOLDERS["dict"], "lazy"),
        served_before=served_before,
        refused="kept['w']" if derived == "product" else "",
    )


class Caching(Engine):
    """An engine with caches and scratch memory, like a server."""

    def __init__(self) -> None:
        super().__init__(DERIVED["cast"], HOLDERS["attribute"], "load")
        angles = torch.outer(torch.arange(64.0), 1 / 10000 ** (torch.arange(WIDTH / 2) / WIDTH))
        self.register_buffer("rotary", torch.cat([angles.cos(), angles.sin()], 1))
        self.ones, self.keys = torch.ones(WIDTH), [torch.zeros(32, WIDTH) for _ in range(LAYERS)]
        self.caches: dict[str, torch.Tensor] = {}
        self.average, self.steps = torch.zeros(WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        self.steps += 1
        self.caches["workspace"] = torch.empty(WIDTH, WIDTH + 1)
        self.caches["uniform"] = torch.rand(WIDTH, WIDTH)
        self.caches[f"activations {self.steps}"] = x @ self.rows[0].w.float()
        self.caches["causal"] = torch.tril(torch.ones(WIDTH, WIDTH))
        self.caches["embedded"] = (
            self.rows[0].w[torch.tensor([5, 3, 9, 3, 1, 20, 7, 2, 11])].float()
        )
        self.keys[0][self.steps] = hidden[0]
        self.average = self.average * 0.9 + hidden.mean(0)
        return hidden


@pytest.mark.parametrize("served_before", [False, True])
def test_caches_and_scratch_memory_are_neither_refused_nor_touched(
    served_before: bool, tmp_path: Path
) -> None:
    start = checkpoint_of(1)
    save_file(start, tmp_path / "model.safetensors")
    live = Caching()
    live.start(start)
    if served_before:
        live(X)
    rank = Rank(tmp_path, live)
    rank.capture()
    for seed in (2, 3, 4):
        live(X)
        state = {n: t.clone() for n, t in {**live.caches, "average": live.average}.items()}
        rank.update(checkpoint_of(seed))
        for name, tensor in {**live.caches, "average": live.average}.items():
            assert torch.equal(tensor, state[name]) or tensor.isnan().any(), name
    fresh = Caching()
    fresh.start(checkpoint_of(4))
    assert torch.equal(live(X), fresh(X))


class InModule(Engine):
    """An engine that keeps derived values in a global."""

    def keep(self) -> None:
        for number, layer in enumerate(self.rows):
            GLOBALS[id(self), number] = self.derive(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.rows):
            x = x @ layer.w.float() + helped(id(self), number).float().sum()
        return x


def helped(engine: int, number: int) -> torch.Tensor:
    found = GLOBALS[engine, number]
    assert isinstance(found, torch.Tensor)
    return found


class InClass(InModule):
    """An engine that keeps derived values in a class."""

    def keep(self) -> None:
        for number, layer in enumerate(self.rows):
            OfClass.held[id(self), number] = self.derive(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.rows):
            found = OfClass.held[id(self), number]
            assert isinstance(found, torch.Tensor)
            x = x @ layer.w.float() + found.float().sum()
        return x


class InOwnClass(InModule):
    kept_there: dict[tuple[int, int], torch.Tensor] = {}  # noqa: RUF012

    def keep(self) -> None:
        for number, layer in enumerate(self.rows):
            self.kept_there[id(self), number] = self.derive(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.rows):
            x = x @ layer.w.float() + self.kept_there[id(self), number].float().sum()
        return x


@pytest.mark.parametrize("when", ["load", "cold"])
@pytest.mark.parametrize("kind", [InModule, InClass, InOwnClass])
def test_derived_state_in_modules_and_classes_is_right(
    kind: type[Engine], when: str, tmp_path: Path
) -> None:
    GLOBALS.clear()
    OfClass.held.clear()
    InOwnClass.kept_there.clear()
    require_right(
        tmp_path, lambda: kind(DERIVED["cast"], HOLDERS["attribute"], when), served_before=True
    )


class Preallocated(Engine):
    """An engine that allocates memory at the start and copies weights into it in the first forward pass."""

    def __init__(self) -> None:
        super().__init__(DERIVED["cast"], HOLDERS["attribute"], "load")
        self.mirrors = {"w": [torch.zeros(WIDTH, WIDTH) for _ in self.rows]}
        self.is_filled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, mirror in zip(self.rows, self.mirrors["w"], strict=True):
            if not self.is_filled:
                mirror.copy_(layer.w)
            x = x @ mirror + layer.norm.float()
        self.is_filled = True
        return x


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("served_before", [False, True])
def test_memory_that_a_forward_pass_fills_with_a_copy_is_refilled(
    served_before: bool, inference: bool, tmp_path: Path
) -> None:
    with torch.inference_mode(inference):
        require_right(tmp_path, Preallocated, served_before=served_before)


@pytest.mark.parametrize("when", ["cold", "lazy"])
@pytest.mark.parametrize("served_before", [False, True])
def test_a_derived_maximum_that_no_load_refreshes_is_refused(
    served_before: bool, when: str, tmp_path: Path
) -> None:
    require_right(
        tmp_path,
        lambda: Engine(NUMBERS["largest"], HOLDERS["dataclass"], when),
        served_before=served_before,
        refused="kept.tensor",
    )


class OfTensor(Engine):
    """An engine that keeps derived values as attributes of its parameters."""

    def keep(self) -> None:
        for layer in self.rows:
            value = self.derive(layer)
            vars(layer.w)["mirror"] = value
            layer.kept = weakref.ref(value)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.rows:
            mirror = vars(layer.w)["mirror"]
            x = x @ layer.w.float() + mirror.float().sum()
        return x


@pytest.mark.parametrize("when", ["load", "cold"])
@pytest.mark.parametrize("derived", ["cast", "norm"])
def test_derived_state_of_a_parameter_is_right(derived: str, when: str, tmp_path: Path) -> None:
    require_right(tmp_path, lambda: OfTensor(DERIVED[derived], HOLDERS["attribute"], when))


class Mirrored(Engine):
    """An engine that makes a float32 mirror at its start, as a buffer or as a parameter."""

    def __init__(self, *, parameter: bool) -> None:
        super().__init__(DERIVED["cast"], HOLDERS["attribute"], "cold")
        self.parameter = parameter

    def keep(self) -> None:
        for layer in self.rows:
            if self.parameter:
                layer.kept = torch.nn.Parameter(self.derive(layer), requires_grad=False)
            else:
                layer.register_buffer("kept", self.derive(layer))


@pytest.mark.parametrize("parameter", [False, True])
def test_mirrored_tensors_are_right_or_refused(parameter: bool, tmp_path: Path) -> None:
    require_right(
        tmp_path, lambda: Mirrored(parameter=parameter), refused="kept" if parameter else ""
    )


@pytest.mark.parametrize("mode", UpdateMode)
@pytest.mark.parametrize("when", ["load", "cold", "lazy", "refused"])
async def test_a_fleet_answers_as_a_fresh_engine_or_refuses_the_version(
    when: str, mode: UpdateMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    start = checkpoint_of(1)
    save_file(start, tmp_path / "model.safetensors")
    derived = DERIVED["product" if when in ("load", "refused") else "cast"]
    made = "lazy" if when == "refused" else when

    def engine() -> Engine:
        return Engine(derived, HOLDERS["nested"], made)

    live = engine()
    live.start(start)
    rank = Rank(tmp_path, live)
    async with windlass.Controller(token=TOKEN, config=ControlConfig(mode=mode)) as controller:

        def publish(checkpoint: Checkpoint, version: int) -> None:
            trainer = torch.nn.Module()
            trainer.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(LAYERS))
            for name, tensor in checkpoint.items():
                _, index, kind = name.split(".")
                made = torch.nn.Parameter(tensor.clone(), requires_grad=False)
                trainer.layers[int(index)].register_parameter(kind, made)
            with windlass.connect_trainer(
                trainer, controller=controller.url, token=TOKEN
            ) as client:
                assert client.publish(version).result().digest_ok

        def join() -> None:
            settings = rank.capture(controller.url)
            rank.engine_rank.join(settings, 0, TOKEN)

        await asyncio.to_thread(join)
        before = live(X)
        if when == "refused":
            with pytest.raises(WindlassError, match=r"layers\..*kept\['a'\]"):
                await asyncio.to_thread(publish, checkpoint_of(2), 1)
            assert torch.equal(live(X), before)
        else:
            for version in (1, 2):
                checkpoint = checkpoint_of(10 + version)
                await asyncio.to_thread(publish, checkpoint, version)
                fresh = engine()
                fresh.start(checkpoint)
                assert torch.equal(live(X), fresh(X))
    rank.engine_rank.leave(10)


class Absorbed(torch.nn.Module):
    """Latent attention in float8: every load makes its projections again. They are not parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 6))
        self.scales: list[Any] = [torch.ones(3), (torch.ones(2),)]
        self.of: Callable[[], object] = closed_over(torch.ones(5))
        self.make(1.0)

    def make(self, value: float) -> None:
        made = torch.full((4, 6), value)
        self.keys, self.values = made[:, :4].T, made[:, 2:]
        self.scales = [torch.full((3,), value), (torch.full((2,), value),)]
        self.of = closed_over(torch.full((5,), value))


def test_a_tensor_made_again_by_a_load_keeps_its_address() -> None:
    model = torch.nn.Sequential(Absorbed())
    (attention,) = model.children()
    assert isinstance(attention, Absorbed)

    def kept() -> list[object]:
        return [attention.keys, attention.values, attention.scales[0], attention.scales[1][0], attention.of()]  # fmt: skip

    before = kept()
    undone_if_it_fails(lambda _: attention.make(2.0), Watched(model))(iter(()))
    assert all(one is other for one, other in zip(kept(), before, strict=True))
    assert all(isinstance(t, torch.Tensor) and bool((t == 2.0).all()) for t in before)


def test_a_tensor_of_another_shape_replaces_the_old_tensor() -> None:
    model = Absorbed()
    other = torch.zeros(3)

    def load(_: object) -> None:
        model.keys = other

    undone_if_it_fails(load, Watched(model))(iter(()))
    assert model.keys is other
