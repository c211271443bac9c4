"""Walk all objects that a model references, directly or indirectly: modules, tensors, containers, functions, others.

Engines store values that they compute from weights in parameters, dicts, objects, closures, attributes of tensors and
numpy arrays. Capture searches for tensors with the same walk that `Snapshot` uses to record and restore state.
"""

from __future__ import annotations

import array
import asyncio
import concurrent.futures
import contextlib
import ctypes
import enum
import functools
import gc
import io
import mmap
import queue
import socket
import sys
import threading
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain, compress
from multiprocessing.shared_memory import SharedMemory
from operator import attrgetter
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    SimpleNamespace,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

_TEST_TOOLS = ("pytest", "_pytest", "pluggy", "hypothesis")
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "windlass", *_TEST_TOOLS})
"""Packages whose functions and objects the walk skips.

The list includes pytest, because pytest rewrites `assert` statements in a model's code, and the new code references
pytest's session.
"""
_APART = frozenset({"compilation", "config", "configs", "distributed"})
"""Names of subpackages, such as `vllm.compilation` and `vllm.config`. The walk skips objects of classes in these packages.

Compiled code references the memory of CUDA graphs, and most objects of an engine share its configuration. The walk does
not skip containers, torch modules and tensors of these classes.
"""
_RUNNERS = (
    *("vllm.v1.worker", "vllm.v1.core", "vllm.v1.engine", "vllm.v1.executor", "vllm.entrypoints"),
    *("sglang.srt.managers", "sglang.srt.mem_cache", "sglang.srt.model_executor"),
    "sglang.srt.entrypoints",
)
"""Packages that run an engine's model. The walk skips objects of these packages, too.

If a function of the model references such an object, the walk would otherwise continue to KV caches and requests.
"""
_LOGS = frozenset({"sglang.srt.runtime_context.RuntimeContext._overrides_log"})
"""Slots of classes that the walk skips.

SGLang adds an entry to this list at each change of a setting, for example of the weights' version. Without this exception,
the model would seem to have changed after every update.
"""
_OPENED = (
    *(UserDict, UserList, ChainMap, SimpleNamespace),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(contextlib.nullcontext, torch.distributions.Distribution),
    *(SharedMemory, torch.export.ExportedProgram),
)
"""Python classes of the standard library and torch that the walk enters. It skips all other Python classes of both."""
_SHARED = (
    *((dist.ProcessGroup,) if dist.is_available() else ()),
    *(threading.Thread, asyncio.Task, socket.socket),
)
"""If an object has an attribute of one of these classes, the walk skips the object.

Such an object (for example a communicator) has state that objects outside the model share.
"""
_LOCKS = type(threading.Lock()), type(threading.RLock())
"""If an object has an attribute of one of these classes, other threads use the object too. See `Node.is_global`."""
_SERVERS = frozenset({"vllm", "sglang", "transformers"})
"""Packages of servers. The walk skips objects of these packages that have a lock: such an object belongs to the server."""
_MADE_IN_PYTHON = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`, the flag of classes defined in Python. The walk reads the slots of these classes only."""
_UNSET = object()
Number = bool | int | float | complex


class Form(enum.Enum):
    """Kind of an object, which determines how the walk finds the values in the object.

    CELL: a cell of a closure.
    REFERENCE: a weak reference.
    VARIABLE: a context variable.
    BYTES: an object whose contents are bytes, such as a bytearray or a packed weight.
    OPAQUE: an object, such as a queue or an iterator, that gives Python code no list of its values.
    OBJECT: an instance of any other class.
    """

    MODULE = enum.auto()
    TENSOR = enum.auto()
    ARRAY = enum.auto()
    DICT = enum.auto()
    SEQUENCE = enum.auto()
    SET = enum.auto()
    OBJECT = enum.auto()
    FUNCTION = enum.auto()
    METHOD = enum.auto()
    PARTIAL = enum.auto()
    CELL = enum.auto()
    REFERENCE = enum.auto()
    BYTES = enum.auto()
    OPAQUE = enum.auto()
    VARIABLE = enum.auto()
    CLASS = enum.auto()


class Join(enum.Enum):
    """Kind of reference from one object to another.

    ATTRIBUTE, SLOT: the value is in the object's `__dict__` or in one of its `__slots__`.
    ITEM, MEMBER: the value is an item of a dict or sequence, or a member of a set.
    CONTENTS: the value is in a closure's cell.
    CALL: Python code gets the value by a call, or not at all.
    """

    ATTRIBUTE = enum.auto()
    SLOT = enum.auto()
    ITEM = enum.auto()
    MEMBER = enum.auto()
    CONTENTS = enum.auto()
    CALL = enum.auto()


@dataclass(frozen=True, slots=True)
class Shape:
    """Description of the values in objects of one class.

    Attributes:
        form: kind of the objects.
        has_dict: whether the objects have a `__dict__` with attributes.
        members: descriptors of the `__slots__`.
    """

    form: Form
    has_dict: bool = False
    members: tuple[MemberDescriptorType, ...] = ()


_NUMBER, _SHARED_STATE, _LOCK = object(), object(), object()
"""Markers for the classes of Python numbers, for the classes in `_SHARED`, and for the classes in `_LOCKS`."""
_SHAPES: dict[type, Any] = {}
"""Cache: class -> `Shape`, one of the three markers, or None for a class that the walk skips."""


@final
@dataclass(slots=True, eq=False)
class Node:
    """An object that the walk has found.

    Attributes:
        shape: description of the object's values.
        holder: the first object in which the walk found a reference to `item`; None for modules of the model, classes
            and namespaces of Python modules.
        join: kind of the reference in `holder`.
        key: name, index or key of the reference in `holder`.
        is_global: True if the object belongs to a class or to a Python module, or has a lock, so that other models and
            threads may use it.
    """

    item: Any
    shape: Shape
    holder: Node | None
    join: Join = Join.ATTRIBUTE
    key: Any = ""
    is_global: bool = False
    _path: str | None = None

    @property
    def path(self) -> str:
        """Path of the object, similar to a Python expression, such as `layers.0.cache['k']`."""
        if self._path is None:
            self._path = joined(self.holder.path if self.holder else "", self.join, self.key)
        return self._path

    @property
    def is_model_tensor(self) -> bool:
        """Whether the object is a tensor that the model keeps.

        False for a tensor that the walk got by a call (`Join.CALL`): the call may have created the tensor, which is then
        freed after the walk.
        """
        return isinstance(self.item, torch.Tensor) and self.join is not Join.CALL

    def put(self, value: object) -> bool:
        """Replace this object by `value` in `holder`; return False if this is not possible."""
        holder = self.holder
        if holder is None or not _put(holder, self.join, self.key, self.item, value):
            return False
        self.item = value
        return True


def joined(path: str, join: Join, key: Any) -> str:
    """Return the path of a value in the object at `path`."""
    match join:
        case Join.ATTRIBUTE:
            return f"{path}.{key}" if path else str(key)
        case Join.SLOT:
            return f"{path}.{key.__name__}"
        case Join.ITEM:
            return f"{path}[{_spelt(key)}]"
        case Join.MEMBER:
            return f"{path}{{{key}}}"
        case _:
            return path if join is Join.CONTENTS else f"{path}()"


def _spelt(key: object) -> str:
    """Return the text of a dict's key in a path. For a key that is not a plain value, return the name of its class."""
    if isinstance(key, str | int | float | bool | torch.dtype | torch.device) or key is None:
        return repr(key)
    if type(key) is tuple:
        return ", ".join(map(_spelt, key))
    return f"<{type(key).__name__}>"


def _put(holder: Node, join: Join, key: Any, old: object, value: object) -> bool:
    """Replace `old` by `value` in the object of `holder`; return False if Python does not allow this.

    A tuple cannot change, so a new tuple replaces it in the object that references the tuple.
    """
    item = holder.item
    match holder.shape.form:
        case Form.DICT if join is Join.ITEM or not holder.shape.has_dict:
            item[key] = value
        case Form.SEQUENCE if isinstance(item, tuple):
            members = [value if at == key else member for at, member in enumerate(item)]
            made = _named_or_plain(type(item), members)
            return holder.put(made)
        case Form.SEQUENCE if join is Join.ITEM:
            item[key] = value
        case Form.SET if isinstance(item, set):
            item.discard(old)
            item.add(value)
        case Form.CELL:
            item.cell_contents = value
        case Form.PARTIAL:
            parts = {"func": item.func, "args": item.args, "keywords": item.keywords, key: value}
            state = (parts["func"], parts["args"], parts["keywords"], vars(item))
            item.__setstate__(state)
        case Form.FUNCTION if key == "__defaults__":
            item.__defaults__ = value
        case Form.CLASS:
            setattr(item, key, value)
        case _ if join is Join.SLOT:
            key.__set__(item, value)
        case _ if join is Join.ATTRIBUTE and holder.shape.has_dict:
            vars(item)[key] = value
        case _:
            return False
    return True


def _named_or_plain(kind: Any, members: list[object]) -> object:
    """Return a tuple of the class `kind`, which may be a named tuple."""
    return kind(*members) if "_fields" in dir(kind) else kind(members)


@final
@dataclass(slots=True)
class Reach:
    """Result of one walk.

    Attributes:
        nodes: all objects that can contain values, each once; modules of the model first.
        tensors: nodes of tensors, arrays and bytes, in this order: parameters of the model's modules, buffers of the
            modules, other attributes of the modules, and then all other nodes.
        num_parameters, num_buffers, num_attributes: number of tensors in each of the first three groups.
        empty: empty containers of the model.
        empty_globals: empty containers of classes and Python modules.
        globals: global variables that functions of the model use: (namespace, name, value).
    """

    nodes: list[Node] = field(default_factory=list)
    tensors: list[Node] = field(default_factory=list)
    num_parameters: int = 0
    num_buffers: int = 0
    num_attributes: int = 0
    empty: list[Any] = field(default_factory=list)
    empty_globals: list[Any] = field(default_factory=list)
    globals: list[tuple[dict[str, Any], str, object]] = field(default_factory=list)
    _numbers: list[tuple[Node, Join, Any, Number]] = field(default_factory=list)

    def numbers(self) -> dict[str, Number]:
        """Return the Python numbers in all objects, by path."""
        return {joined(n.path, join, key): value for n, join, key, value in self._numbers}


@final
class Signature:
    """Identities (`id`) of all objects of a walk, to find out later whether the model references new objects.

    An update compares them while the engine does not generate, so C code loops over nearly all values. A signature keeps
    the model's containers alive, but not its tensors. It records when a tensor is freed, because a later object may get the
    `id` of the freed tensor.
    """

    def __init__(self, found: Reach) -> None:
        self._freed: list[object] = []
        self._tensors = [
            weakref.ref(node.item, self._freed.append)
            for node in found.tensors
            if node.is_model_tensor
        ]
        self._others: list[tuple[Any, Shape, list[int]]] = []
        self._globals = [(names, name, id(value)) for names, name, value in found.globals]
        self._containers: list[Collection[object]] = []
        self._cells: list[CellType] = []
        self._functions: list[FunctionType] = []
        with _uncollected():
            for node in found.nodes:
                self._note(node.item, node.shape)
            for item in (*found.empty, *found.empty_globals):
                self._note(item, _shape_of(item))
            self._sizes = [*map(len, self._containers)]
            # A comparison of sizes is enough for empty containers.
            self._filled = [container for container in self._containers if container]
            self._ids = self._identities()
            self._entered = np.fromiter(map(_is_entered, self._values()), dtype=bool)

    def _note(self, item: Any, shape: Shape) -> None:
        """Record where to find an object's values: live views of its attributes and items, its cell, its defaults.

        Python has no live view of other values, such as slots. Record the identities of these values in `_others`.
        """
        if shape.has_dict:
            self._containers.append(vars(item).values())
        if isinstance(item, dict):
            # `values` of a subclass may return a copy, which is not a live view.
            self._containers.append(dict.values(item))
        elif type(item) in (list, set):
            self._containers.append(item)
        elif type(item) is CellType and [*contents_of(item)]:
            self._cells.append(item)
        elif type(item) is FunctionType:
            self._functions.append(item)
        elif type(item) not in (tuple, frozenset) and (shape.members or shape.form in _COMPARED):
            self._others.append((item, shape, _followed(_members(item, shape))))

    def _values(self) -> Iterator[object]:
        """Return the current values in all containers, cells and defaults of functions, in a fixed order."""
        return chain(
            chain.from_iterable(self._filled),
            map(_IN_CELL, self._cells),
            map(_DEFAULTS, self._functions),
        )

    def _identities(self) -> npt.NDArray[np.uintp]:
        """Return the identities of `_values`."""
        return np.fromiter(map(id, self._values()), dtype=np.uintp)

    def holds(self) -> bool:
        """Return whether the model still references the same objects. Numbers and strings may differ."""
        try:
            return self._holds()
        # Another thread changed a container during the comparison, or emptied a cell.
        except (RuntimeError, ValueError):
            return False

    def _holds(self) -> bool:
        """Return whether all recorded identities are unchanged, and no tensor was freed.

        Raises:
            RuntimeError: another thread changed a container at the same time.
            ValueError: a cell is empty now.
        """
        return (
            not self._freed
            and [*map(len, self._containers)] == self._sizes
            and self._holds_values()
            and all(id(names.get(name)) == value for names, name, value in self._globals)
            and all(_followed(_members(item, shape)) == kept for item, shape, kept in self._others)
        )

    def _holds_values(self) -> bool:
        """Return whether each value is the recorded object. Ignore changes between objects that the walk does not enter."""
        ids = self._identities()
        if len(ids) != len(self._ids):
            return False
        differs = ids != self._ids
        if not differs.any():
            return True
        now = compress(self._values(), differs.tolist())
        return not self._entered[differs].any() and not any(map(_is_entered, now))


_IN_CELL = attrgetter("cell_contents")
_DEFAULTS = attrgetter("__defaults__")


def _is_entered(value: object) -> bool:
    """Return whether the walk enters a value. It enters no numbers, no locks, and no skipped objects."""
    return _SHAPES.get(type(value), _UNSET) not in (None, _NUMBER, _LOCK)


def _followed(values: Iterable[object]) -> list[int]:
    """Return the identities of the values that the walk enters."""
    return [id(value) for value in values if _is_entered(value)]


def _members(item: Any, shape: Shape) -> Iterable[object]:
    """Return the values in an object, except the values in its `__dict__`. The object must not be a dict."""
    held: Iterable[object] = ()
    match shape.form:
        case Form.SEQUENCE | Form.SET:
            held = item
        case Form.CELL:
            held = [value for _, value in contents_of(item)]
        case Form.FUNCTION:
            held = item.__defaults__ or ()
        case Form.PARTIAL:
            held = (item.args, item.keywords)
        case Form.REFERENCE | Form.OPAQUE | Form.VARIABLE:
            held = _returned(item, shape.form)
        case _:
            pass
    return (*held, *slots_of(item, shape).values()) if shape.members else held


def reach(model: torch.nn.Module) -> Reach:
    """Walk a model breadth first, so that every object has a short path, and return the result."""
    with _uncollected():
        return _reached(model)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector in the `with` block, because thousands of new objects would start it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _reached(model: torch.nn.Module) -> Reach:
    """Walk a model. Add all parameters first, then all buffers, then the other contents of modules, then all else."""
    found = Reach()
    walk = _Walk(found)
    modules = [walk.begin(module, path) for path, module in model.named_modules()]
    for node in modules:
        walk.add_dict_of(node, "_parameters")
    found.num_parameters = len(found.tensors)
    for node in modules:
        walk.add_dict_of(node, "_buffers")
    found.num_buffers = len(found.tensors) - found.num_parameters
    for node in modules:
        walk.enter(node)
    found.num_attributes = len(found.tensors) - found.num_parameters - found.num_buffers
    walk.enter_others(len(modules))
    return found


@final
class _Walk:
    """One walk through a model. Each method adds nodes to the `Reach` that the constructor gets.

    To enter a node means to add nodes for the values in the node's object.
    """

    def __init__(self, found: Reach) -> None:
        self._found = found
        # `id` of every object found. `Reach.nodes` keeps these objects alive, so no other object gets the same `id`.
        self._seen: set[int] = set()
        self._classes: dict[type, None] = {}
        self._packages: set[str] = set()

    def begin(self, module: torch.nn.Module, path: str) -> Node:
        """Add a node for a module of the model, without the module's contents, and return the node."""
        node = Node(module, _shape_of(module), None, _path=path)
        self._seen.add(id(module))
        self._found.nodes.append(node)
        self._classes[type(module)] = None
        self._packages.add(type(module).__module__.partition(".")[0])
        return node

    def add_dict_of(self, module: Node, which: str) -> None:
        """Add nodes for a module's dict `which` (`_parameters` or `_buffers`), and for the tensors in this dict."""
        held = vars(module.item)[which]
        if isinstance(module.item, torch.jit.ScriptModule):
            held = dict(held.items())
        if id(held) in self._seen:
            return
        if not held:
            self._found.empty.append(held)
            return
        node = Node(held, _shape_of(held), module, _path=module.path)
        self._seen.add(id(held))
        self._found.nodes.append(node)
        for name, tensor in held.items():
            if tensor is not None:
                self._add(tensor, _shape_of(tensor), node, Join.ITEM, name, joined(module.path, Join.ATTRIBUTE, name))  # fmt: skip

    def enter_others(self, begin: int) -> None:
        """Enter every node from index `begin` on, and the classes of all modules and objects.

        Repeat until no new node is found.
        """
        nodes = self._found.nodes
        at, num_classes = begin, 0
        while True:
            while at < len(nodes):
                self.enter(nodes[at])
                at += 1
            classes = [*self._classes][num_classes:]
            num_classes += len(classes)
            for kind in classes:
                self._enter_class(kind)
            if at == len(nodes):
                return

    def _add(
        self, item: object, shape: Shape, holder: Node, join: Join, key: object, path: str | None = None
    ) -> None:  # fmt: skip
        """Add a node for an object, unless the walk has found the object before.

        The object of `holder` references `item`; `join` and `key` describe the reference. If `path` is None, the path
        follows from `holder`, `join` and `key`.
        """
        if id(item) in self._seen:
            return
        self._seen.add(id(item))
        node = Node(item, shape, holder, join, key, holder.is_global, path)
        self._found.nodes.append(node)
        if shape.form in _WITH_ELEMENTS:
            self._found.tensors.append(node)
        elif shape.form is Form.MODULE or shape.form is Form.OBJECT:
            self._classes[type(item)] = None

    def enter(self, node: Node) -> None:
        """Add nodes for the values in an object."""
        shape, item = node.shape, node.item
        if shape.has_dict and not self._enter_attributes(node, vars(item)):
            return
        if shape.members:
            slots = slots_of(item, shape)
            self._values(node, Join.SLOT, slots.items())
        match shape.form:
            case Form.MODULE | Form.OBJECT | Form.CLASS:
                pass
            case Form.DICT:
                # Do not call `item.items`, because a subclass may load or compute values there.
                self._values(node, Join.ITEM, dict.items(item))
            case Form.SEQUENCE:
                self._values(node, Join.ITEM, enumerate(item))
            case Form.SET:
                self._values(node, Join.MEMBER, enumerate(item))
            case Form.FUNCTION:
                self._function(node, item)
            case Form.METHOD:
                self._values(node, Join.ATTRIBUTE, (("__self__", item.__self__), ("__func__", item.__func__)))  # fmt: skip
            case Form.PARTIAL:
                parts = (("func", item.func), ("args", item.args), ("keywords", item.keywords))
                self._values(node, Join.ATTRIBUTE, parts)
            case Form.CELL:
                self._values(node, Join.CONTENTS, contents_of(item))
            case _:
                self._values(node, Join.CALL, (("", value) for value in _returned(item, shape.form)))  # fmt: skip

    def _is_of_server(self, kind: type) -> bool:
        """Return whether a class belongs to the server, not to the model. Call this only for a class whose objects have a lock.

        Return True if the class is in a server's package, or if no module of the model is in the class's package. The walk
        then skips the objects of the class.
        """
        package = kind.__module__.partition(".")[0]
        return package in _SERVERS or package not in self._packages

    def _enter_attributes(self, node: Node, held: Mapping[str, Any]) -> bool:
        """Add nodes for an object's attributes, and return True. If the walk must skip the object, remove its node, and return False.

        The walk skips an object that has an attribute of a class in `_SHARED`. It also skips an object that has a lock and
        belongs to the server. For any other object with a lock, set `Node.is_global`.
        """
        if node.shape.form is Form.OBJECT:
            shapes = _SHAPES
            for value in held.values():
                kind = type(value)
                shape = shapes[kind] if kind in shapes else _classify(kind)
                of_server = shape is _LOCK and self._is_of_server(type(node.item))
                if shape is _SHARED_STATE or of_server:
                    self._found.nodes.remove(node)
                    return False
                if shape is _LOCK:
                    node.is_global = True
        self._values(node, Join.ATTRIBUTE, held.items())
        return True

    def _values(self, node: Node, join: Join, held: Iterable[tuple[Any, Any]]) -> None:
        """Add nodes for the values in the object of `node`; `held` has pairs of key and value.

        Record Python numbers and empty containers in separate lists, without nodes. Ignore values whose classes the walk
        skips.
        """
        shapes, found, seen = _SHAPES, self._found, self._seen
        for key, value in held:
            kind = type(value)
            shape = shapes[kind] if kind in shapes else _classify(kind)
            if shape is None or shape is _SHARED_STATE or shape is _LOCK:
                continue
            if shape is _NUMBER:
                found._numbers.append((node, join, key, value))
                continue
            if id(value) in seen:
                continue
            if kind in PLAIN and not value:
                (found.empty_globals if node.is_global else found.empty).append(value)
                continue
            if shape.form is Form.OPAQUE and _is_static(value):
                continue
            if shape.form is Form.FUNCTION and _is_foreign(value.__module__ or "torch"):
                continue
            if shape.form is Form.METHOD and id(value.__self__) in seen and id(value.__func__) in seen:  # fmt: skip
                continue
            self._add(value, shape, node, join, key)

    def _function(self, node: Node, function: FunctionType) -> None:
        """Add the closure and the default arguments of a function, and the global variables that it uses."""
        if function.__closure__:
            names = function.__code__.co_freevars
            self._values(node, Join.ATTRIBUTE, zip(names, function.__closure__, strict=True))
        parts = ("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__)
        self._values(node, Join.ATTRIBUTE, parts)
        self._globals(_globals_of(function))

    def _enter_class(self, kind: type) -> None:
        """Add the values that the methods of a class and of its base classes can read.

        For each of these classes, add the data in its attributes, its functions that have state, and the globals that its
        functions use.
        """
        for base in kind.__mro__:
            if not _is_foreign(base.__module__):
                self._class_state(base)
                self._functions(base)
                self._globals(_globals_of_class(base))

    def _functions(self, kind: type) -> None:
        """Add the functions of a class if they have state, for example a decorator's cache in the function's closure."""
        path = f"{kind.__module__}.{kind.__qualname__}"
        for name, value in vars(kind).items():
            function = _function_in(value)
            if function is not None and _has_state(function) and id(function) not in self._seen:
                self._seen.add(id(function))
                node = Node(
                    function, _shape_of(function), None, is_global=True, _path=f"{path}.{name}"
                )
                self._found.nodes.append(node)

    def _class_state(self, kind: type) -> None:
        """Add a class and the data in its attributes; skip names that begin with two underscores."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        path = f"{kind.__module__}.{kind.__qualname__}"
        node = Node(kind, Shape(Form.CLASS), None, is_global=True, _path=path)
        held = [(n, v) for n, v in vars(kind).items() if not n.startswith("__") and _is_data(v)]
        if held:
            self._found.nodes.append(node)
            self._values(node, Join.ATTRIBUTE, held)

    def _globals(self, named: Iterable[tuple[dict[str, Any], str]]) -> None:
        """Add global variables, given as (namespace, name). If a variable is a class, add the data in its attributes."""
        for names, name in named:
            value = names.get(name)
            if isinstance(value, type):
                if not _is_foreign(value.__module__) and not issubclass(value, enum.Enum):
                    self._class_state(value)
            elif value is None or _is_data(value) or isinstance(value, FunctionType):
                node = Node(names, Shape(Form.DICT), None, is_global=True, _path=str(names.get("__name__")))  # fmt: skip
                self._found.globals.append((names, name, value))
                self._values(node, Join.ATTRIBUTE, ((name, value),))


_COMPARED = frozenset(
    {Form.SEQUENCE, Form.SET, Form.CELL, Form.REFERENCE, Form.OPAQUE, Form.VARIABLE, Form.FUNCTION, Form.PARTIAL}
)  # fmt: skip
"""Kinds of objects, other than dicts, that a `Signature` compares by their values."""
_WITH_ELEMENTS = frozenset({Form.TENSOR, Form.ARRAY, Form.BYTES})
PLAIN = frozenset({dict, OrderedDict, list, set, deque})
"""Container classes without attributes in their instances (engines set none on an `OrderedDict`)."""


def contents_of(cell: CellType) -> Iterator[tuple[str, object]]:
    """Yield an empty key and the value in a closure's cell; yield nothing for an empty cell."""
    try:
        yield "", cell.cell_contents
    # The cell is empty.
    except ValueError:
        return


def _returned(item: Any, form: Form) -> Iterable[object]:
    """Return the values in an object that are neither its attributes nor its items.

    These are the target of a weak reference, the value of a context variable, the values in a queue, the fields of a
    structured array, the parts of a nested or sparse tensor, and the gradient of a tensor.
    """
    match form:
        case Form.REFERENCE:
            return (item(),)
        case Form.OPAQUE:
            return _inside(item)
        case Form.VARIABLE:
            return (item.get(None),)
        case Form.ARRAY if isinstance(item, np.ndarray) and item.dtype.names:
            return [item[name] for name in item.dtype.names]
        case Form.ARRAY if isinstance(item, np.ndarray) and item.dtype.hasobject:
            return item.flat
        case Form.TENSOR if item.is_nested:
            return (item.values(),)
        case Form.TENSOR if item.layout is torch.sparse_coo:
            return item._indices(), item._values()
        case Form.TENSOR if item.layout in (torch.sparse_csr, torch.sparse_bsr):
            return item.crow_indices(), item.col_indices(), item.values()
        case Form.TENSOR if item.layout in (torch.sparse_csc, torch.sparse_bsc):
            return item.ccol_indices(), item.row_indices(), item.values()
        case Form.TENSOR if item.is_leaf and item.grad is not None:
            return (item.grad,)
        case _:
            return ()


def _inside(item: Any) -> Iterable[object]:
    """Return the values in an object without accessible attributes or items, such as a queue or a future."""
    if isinstance(item, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        return _script_values(item)
    if not isinstance(item, torch.Future):
        return gc.get_referents(item)
    # `value` raises the future's error if the computation failed.
    with suppress(Exception):
        return [item.value()] if item.done() else []
    return []


def _script_values(item: Any) -> list[object]:
    """Return the tensors of compiled TorchScript, and the values of a script module's other attributes.

    The tensors include the constants of the compiled graph. The returned constants share memory with the graph.
    """
    found: list[object] = []
    if isinstance(item, torch.jit.ScriptModule):
        found += [*item.parameters(), *item.buffers()]
        with suppress(RuntimeError, AttributeError):
            found += [item._c.getattr(name) for name in item._concrete_type.get_attributes()]
    # A module may have no `forward`.
    with suppress(RuntimeError, AttributeError):
        graph = item.inlined_graph
        for node in graph.findAllNodes("prim::Constant", recurse=True):
            if "value" in node.attributeNames() and node.kindOf("value") == "t":
                found.append(node.t("value"))
    return found


def slots_of(item: object, shape: Shape) -> dict[MemberDescriptorType, object]:
    """Return the values in the `__slots__` of an object, without empty slots."""
    return {m: v for m in shape.members if (v := value_of(m, item)) is not _UNSET}


def value_of(member: MemberDescriptorType, item: object) -> object:
    """Return the value in a slot; `_UNSET` if the slot is empty."""
    try:
        return member.__get__(item)
    except AttributeError:
        return _UNSET


def _shape_of(item: object) -> Shape:
    """Return the description of an object's class. Call this only if the walk does not skip the class."""
    # Use `type`, because `__class__` of a proxy object is the class of another object.
    kind = type(item)
    found: Shape = _SHAPES[kind] if kind in _SHAPES else _classify(kind)
    return found


_OPAQUE = (
    *(type(functools.lru_cache(len)), threading.local),
    *(queue.Queue, queue.SimpleQueue, concurrent.futures.Future, asyncio.Future),
    *(torch.Future, torch.jit.ScriptFunction, torch.jit.ScriptModule),
)
"""Classes of objects that give Python code no list of their values. The walk asks the garbage collector for the values."""
_OF_C = frozenset({"builtins", "itertools", "operator", "_collections"})
"""Python modules of other C classes (iterators, views, generators, bound methods) that the walk treats like `_OPAQUE`."""
_COLLECTED = 1 << 14
"""`Py_TPFLAGS_HAVE_GC`, the flag of classes whose objects may reference other objects."""
_NO_DATA = (
    *(type, types.ModuleType, property, staticmethod, classmethod, super, slice, BaseException),
    *(CodeType, FrameType, TracebackType, CoroutineType, AsyncGeneratorType),
    *(GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType),
)  # fmt: skip
"""C classes whose objects the walk skips."""
BUFFERS = (bytearray, array.array, mmap.mmap, ctypes.Array, io.BytesIO)
"""Classes of objects with bytes that code may write."""
_FORMS: tuple[tuple[type | tuple[type, ...], Form], ...] = (
    (torch.jit.ScriptModule, Form.OPAQUE),
    (torch.nn.Module, Form.MODULE),
    (torch.Tensor, Form.TENSOR),
    (dict, Form.DICT),
    ((list, tuple, deque), Form.SEQUENCE),
    ((set, frozenset), Form.SET),
    ((np.ndarray, torch.UntypedStorage, torch.TypedStorage), Form.ARRAY),
    ((bytes, *BUFFERS, torch.ScriptObject), Form.BYTES),
    (FunctionType, Form.FUNCTION),
    (MethodType, Form.METHOD),
    (functools.partial, Form.PARTIAL),
    (CellType, Form.CELL),
    (weakref.ReferenceType, Form.REFERENCE),
    (_OPAQUE, Form.OPAQUE),
    (ContextVar, Form.VARIABLE),
)
_LINKS = "_lru_list_elem"
"""Name of the C class in which `functools.lru_cache` keeps a cached value."""


def _classify(kind: type) -> Any:
    """Return the entry of a class in `_SHAPES` (how the walk treats its objects). Add the entry if it is missing."""
    _SHAPES[kind] = found = _find_class_entry(kind)
    return found


def _find_class_entry(kind: type) -> Any:
    """Find out how the walk treats the objects of a class. Return the class's entry for `_SHAPES`."""
    if issubclass(kind, _SHARED):
        return _SHARED_STATE
    if issubclass(kind, _LOCKS):
        return _LOCK
    if kind in (bool, int, float, complex) or issubclass(kind, np.generic):
        return _NUMBER
    form = next((form for of, form in _FORMS if issubclass(kind, of)), Form.OBJECT)
    if kind.__name__ == _LINKS or (form is Form.OBJECT and _is_of_c(kind)):
        form = Form.OPAQUE
    elif form is Form.OBJECT:
        if not issubclass(kind, _OPENED) and (_is_foreign(kind.__module__) or _is_apart(kind)):
            return None
        if issubclass(kind, type | enum.Enum | types.ModuleType):
            return None
    elif issubclass(kind, torch.Size):
        return None
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return Shape(
        form,
        has_dict=kind.__dictoffset__ != 0 and kind not in PLAIN,
        members=tuple(
            m
            for m in members
            if isinstance(m, MemberDescriptorType)
            and m.__objclass__.__flags__ & _MADE_IN_PYTHON
            and f"{m.__objclass__.__module__}.{m.__qualname__}" not in _LOGS
        ),
    )


@functools.cache
def _is_foreign(module: object) -> bool:
    """Return whether the walk skips a class or function because of its package; `module` is its `__module__`.

    In some C classes, `__module__` is a descriptor and not a string. The walk skips these classes.
    """
    return not isinstance(module, str) or module.partition(".")[0] in _FOREIGN


def _is_apart(kind: type) -> bool:
    """Return whether the walk skips the objects of a class because of the Python module that defines the class."""
    return _is_outside(kind.__module__)


@functools.cache
def _is_outside(module: str) -> bool:
    """Return whether the walk skips the objects of a Python module."""
    return _is_foreign(module) or not _APART.isdisjoint(module.split(".")) or module.startswith(_RUNNERS)  # fmt: skip


def _is_of_c(kind: type) -> bool:
    """Return whether a class is a C class (such as an iterator) whose values only the garbage collector can list."""
    is_listed = kind.__module__ in _OF_C and not issubclass(kind, _NO_DATA)
    return is_listed and bool(kind.__flags__ & _COLLECTED)


def _is_static(function: Any) -> bool:
    """Return whether an object is a C function of a module or class. Such a function has no state of its own."""
    if type(function) is not BuiltinMethodType:
        return False
    return function.__self__ is None or isinstance(function.__self__, type | types.ModuleType)


def _is_data(value: object) -> bool:
    """Return whether a value in a class or Python module is data (and not a function, method or class)."""
    kind = type(value)
    shape = _SHAPES[kind] if kind in _SHAPES else _classify(kind)
    if shape is _NUMBER:
        return True
    if not isinstance(shape, Shape) or (shape.form is Form.OPAQUE and _is_static(value)):
        return False
    return shape.form not in (Form.FUNCTION, Form.METHOD, Form.CLASS)


def _has_state(function: FunctionType) -> bool:
    """Return whether the walk must visit a function.

    Visit a function if it has a closure, attributes, or a default that may contain tensors. Return False for functions
    of modules that the walk skips.
    """
    if _is_outside(function.__module__ or "torch"):
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return bool(function.__closure__ or vars(function)) or any(
        isinstance(_shape_of(value), Shape) for value in defaults
    )


_Named = tuple[tuple[dict[str, Any], str], ...]
"""Global variables, each as (namespace, name)."""
_OF_CODE: dict[CodeType, _Named] = {}
"""Cache of `_globals_of`, by the function's code."""
_OF_CLASS: weakref.WeakKeyDictionary[type, _Named] = weakref.WeakKeyDictionary()
"""Cache of `_globals_of_class`."""


def _globals_of(function: FunctionType) -> _Named:
    """Return the global variables (data and classes) that a function may read; see `_variables_used_by`."""
    if function.__code__ not in _OF_CODE:
        _OF_CODE[function.__code__] = tuple(_variables_used_by([function]))
    return _OF_CODE[function.__code__]


def _globals_of_class(kind: type) -> _Named:
    """Return the global variables that the functions of a class may read; see `_variables_used_by`."""
    if kind not in _OF_CLASS:
        functions = [f for value in vars(kind).values() if (f := _function_in(value)) is not None]
        _OF_CLASS[kind] = tuple(_variables_used_by(functions))
    return _OF_CLASS[kind]


def _function_in(value: object) -> FunctionType | None:
    """Return the Python function behind a function, static method, class method or property.

    Return None for any other value, and for a function of a package that the walk skips.
    """
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) and not _is_foreign(value.__module__ or "torch") else None  # fmt: skip


def _variables_used_by(functions: list[FunctionType]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (namespace, name) of the global variables that `functions` use, directly or through calls.

    Skip modules, strings, and functions without state. Follow calls within a Python module to any depth. If a function of
    another Python module is called, search this function, but not the functions that it calls. Find variables that the
    code names directly, and variables that it names through their module, as in `kernels.cache`.
    """
    waiting = [(function, True) for function in functions]
    # Code of each function that is searched -> whether the functions that it calls are searched too.
    seen = dict.fromkeys((function.__code__ for function in functions), True)
    names = set[tuple[int, str]]()
    while waiting:
        function, goes_on = waiting.pop()
        for space, name in _variables_named_in(function):
            value = space[name]
            if isinstance(value, types.ModuleType | str):
                continue
            called = _function_in(value)
            if (id(space), name) not in names and (called is None or _has_state(called)):
                names.add((id(space), name))
                yield space, name
            if called is None or not goes_on:
                continue
            is_near = called.__globals__ is function.__globals__
            before = seen.get(called.__code__)
            # If another module called the function before, its callees were not searched. If the function's own module
            # calls it too, search it again.
            if before is None or (is_near and not before):
                seen[called.__code__] = is_near
                waiting.append((called, is_near))


def _variables_named_in(function: FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (namespace, name) of every global variable that a function's code may read.

    These are globals of the function's own Python module, and attributes of the modules that the code names. Skip
    modules for which `_is_outside` is true. The result may include variables that the function does not read, because
    each name in the code is looked up in each of these modules.
    """
    space = function.__globals__
    spelt = [*_names_in(function.__code__)]
    for name in spelt:
        if name not in space:
            continue
        yield space, name
        module = space[name]
        if isinstance(module, types.ModuleType) and not _is_outside(module.__name__):
            held = vars(module)
            yield from ((held, attribute) for attribute in spelt if attribute in held)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in compiled code, including the code of nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
