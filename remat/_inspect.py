"""A look at what is saved: residuals, the ops that a policy can name, and what `REMAT_LOG=residuals` logs."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, overload

import optree
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import flop_registry

from remat import _torch_internals as internals
from remat import _tree
from remat._errors import RematError, call_site
from remat._frozen import parts
from remat._names import current_name
from remat._remat import plainly, watchers, watching
from remat._replay import Call
from remat._run import Run, active_runs
from remat._values import schema_of
from remat.policies import nothing_saveable

__all__ = ["OpCost", "OpCosts", "Residual", "list_ops", "print_saved_residuals", "saved_residuals"]


@dataclass(frozen=True)
class Residual:
    """A storage that is held between forward and backward. `saved_residuals` lists them.

    **Attributes:**

    - `shape`, `dtype`: of the tensor that was computed, given or captured.
    - `device`: where the value is held: the CPU, if it is offloaded.
    - `nbytes`: bytes of the whole storage.
    - `why`: "from the argument x['w']", "captured w (closure of block)", "named 'attn'" or "output of
        aten.mm.default".
    - `where`: file:line of the code that computed it; for an argument or a captured tensor, of the code that first
        read it.

    Examples:
        >>> import torch
        >>> from remat import remat, saved_residuals
        >>> [residual] = saved_residuals(remat(lambda x: x.sin()), torch.zeros(3))
        >>> residual.shape, residual.nbytes, residual.why
        ((3,), 12, 'from the argument x')
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    why: str
    where: str

    @property
    def computed(self) -> bool:
        """Whether the function computed it. Arguments and captured tensors are there anyway."""
        return not self.why.startswith(("from the argument ", "captured "))


# Where storages come from.


class _Origin:
    """The op that computed what a storage contains."""

    def __init__(self, tensor: Tensor, func: Any) -> None:
        self.storage = weakref.ref(tensor.untyped_storage())
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device
        self.changed_by(func)

    def changed_by(self, func: Any) -> None:
        self.why, self.where = f"output of {func}", call_site()

    def named(self, name: str) -> None:
        self.why, self.where = f"named {name!r}", call_site()


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree that have storages."""
    leaves: list[Any] = optree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided]


class _Origins(internals.TorchDispatchMode):
    """Sees which storages a function makes, and where it first reads the others."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, _Origin] = {}
        self.read: dict[int, tuple[Any, str]] = {}

    def of(self, storage: Any) -> _Origin | None:
        """What a storage contains, if the function made it."""
        origin = self.made.get(id(storage))
        return origin if origin is not None and origin.storage() is storage else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # it is given what `torch.tensor` has just made
            for storage in (t.untyped_storage() for t in _tensors((args, kwargs))):
                if self.of(storage) is None and id(storage) not in self.read:
                    self.read[id(storage)] = storage, call_site()
        out = func(*args, **kwargs)
        for t in _tensors(out):
            storage = t.untyped_storage()
            origin = self.of(storage)
            if id(storage) in self.read:
                continue
            if origin is None:
                self.made[id(storage)] = _Origin(t, func)
            elif func._schema.is_mutable and not schema_of(func).is_view:
                origin.changed_by(func)
            elif (name := current_name()) is not None:
                origin.named(name)
        return out


# What tensors from outside are called.


def _argument_names(fun: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, str]]:
    """The leaves of the arguments of a call, as `x['w']`."""
    try:
        arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # some builtins have no signature
        arguments = {"args": args, **kwargs}
    for name, value in arguments.items():
        accessors, leaves, _ = optree.tree_flatten_with_accessor(value, none_is_leaf=True, namespace="torch")
        yield from zip(leaves, (a.codify(name) for a in accessors), strict=True)


def _globals_of(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    return names.union(*(_globals_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _near(obj: Any, path: str, owner: str) -> Iterator[tuple[Any, str, str]]:
    """What an object holds: each (object, what it is called, the function that holds it)."""
    if isinstance(obj, types.FunctionType):
        name = obj.__name__
        named = inspect.getclosurevars(obj).nonlocals if obj.__closure__ else {}
        used = {n: obj.__globals__[n] for n in _globals_of(obj.__code__) if n in obj.__globals__}
        parameters = obj.__code__.co_varnames[: obj.__code__.co_argcount]
        defaults = dict(zip(parameters[::-1], (obj.__defaults__ or ())[::-1], strict=False))
        for n, value in {**used, **(obj.__kwdefaults__ or {}), **defaults, **named}.items():
            yield value, n, name
    elif isinstance(obj, types.MethodType):
        yield obj.__self__, "self", obj.__func__.__name__
        yield obj.__func__, path, owner
    elif pieces := parts(obj):
        for piece in pieces:
            yield piece, path, owner
    elif isinstance(obj, torch.nn.Module):
        for n, tensor in (*obj.named_parameters(), *obj.named_buffers()):
            yield tensor, f"{path}.{n}".lstrip("."), owner or type(obj).__name__
        yield type(obj).forward, path, owner
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield value, f"{path}[{key!r}]", owner
    elif isinstance(obj, (list, tuple)):
        for i, value in enumerate(obj):
            yield value, f"{path}[{i}]", owner
    elif not isinstance(obj, (type, types.ModuleType)):
        for n, value in getattr(obj, "__dict__", {}).items():
            yield value, f"{path}.{n}".lstrip("."), owner or type(obj).__name__


class _Names:
    """What the tensors are called that a call takes from outside."""

    def __init__(self, fun: Any, args: Any, kwargs: Any) -> None:
        self._names: dict[int, tuple[Any, str]] = {}
        self._fun = getattr(fun, "__name__", type(fun).__name__)
        others = []
        for leaf, name in _argument_names(fun, args, kwargs):
            if isinstance(leaf, Tensor):
                self.add(leaf, f"from the argument {name}")
            elif not isinstance(leaf, (int, float, str, type(None))):
                others.append((leaf, name))
        for root, path in others:
            for tensor, name, _ in self._reachable(root, path):
                self.add(tensor, f"from the argument {name}")
        for tensor, name, owner in self._reachable(fun, ""):
            self.add(tensor, f"captured {name} (closure of {owner or self._fun})")

    @staticmethod
    def _reachable(root: Any, path: str) -> Iterator[tuple[Tensor, str, str]]:
        """The tensors that can be reached from an object, nearest first. This is bounded."""
        seen: set[int] = set()
        level = [(root, path, "")]
        for _ in range(8):
            following: list[tuple[Any, str, str]] = []
            for obj, name, owner in level:
                if isinstance(obj, Tensor):
                    yield obj, name, owner
                elif id(obj) not in seen and len(seen) < 10_000:
                    seen.add(id(obj))
                    following += _near(obj, name, owner)
            level = following

    def add(self, tensor: Tensor, why: str) -> None:
        raw = internals.innermost(tensor)
        if raw.layout == torch.strided:
            storage = raw.untyped_storage()
            self._names.setdefault(id(storage), (storage, why))

    def rank(self, why: str) -> int:
        """The place of arguments and captured tensors in a list, in the order of the call; the others come after."""
        found = [i for i, (_, name) in enumerate(self._names.values()) if name == why]
        return found[0] if found else len(self._names)

    def of(self, storage: Any) -> str:
        return self._names.get(id(storage), (None, f"captured a tensor (closure of {self._fun})"))[1]


# Residuals.


class _Held:
    """What an open graph holds."""

    def __init__(self, names: _Names, origins: _Origins | None) -> None:
        self.names = names
        self.origins = origins
        self.residuals: list[Residual] = []
        """Each storage once."""
        self._seen: set[int] = set()

    def _add(self, shape: Any, dtype: Any, storage: Any, why: str, where: str) -> None:
        if id(storage) not in self._seen and storage.nbytes():
            self._seen.add(id(storage))
            self.residuals.append(Residual(tuple(shape), dtype, storage.device, storage.nbytes(), why, where))

    def add_saved(self, tensor: Tensor, where: str) -> None:
        """A tensor that a node has saved."""
        storage = tensor.untyped_storage()
        origin = None if self.origins is None else self.origins.of(storage)
        if origin is None:
            read = self.origins.read.get(id(storage), (None, where))[1] if self.origins is not None else where
            self._add(tensor.shape, tensor.dtype, storage, self.names.of(storage), read)

    def add_kept(self, call: Call) -> None:
        """What a policy has kept of a call."""
        for kept in call.tape.kept.values() if call.tape is not None else ():
            if self.origins is not None and not kept.offloaded:
                continue  # it is what an op returned, and listed with that
            why = f"output of {kept.func}" if kept.name is None else f"named {kept.name!r}"
            self._add(kept.size, kept.dtype, kept.memory.untyped_storage(), why, kept.where)

    def add_made(self) -> None:
        """What the function has made and is still there."""
        for origin in self.origins.made.values() if self.origins is not None else ():
            if (storage := origin.storage()) is not None:
                self._add(origin.shape, origin.dtype, storage, origin.why, origin.where)


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _roots(out: Any) -> list[Any]:
    return [get_gradient_edge(t).node for t in _tensors(out) if t.requires_grad]


def _forward(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A result that has a graph if any can be had, and the arguments that it was computed from.

    Where no argument and no captured tensor requires grad, all arguments do, as under `torch.func.grad`.
    """
    if internals.transforms_active():
        raise RematError("remat: look at residuals and ops from outside of all transforms, not inside of one.")
    with torch.enable_grad(), torch.random.fork_rng(_cuda_devices()):
        out = fun(*args, **kwargs)
        if any(t.requires_grad for t in _tensors(out)):
            return out, args, kwargs
        leaves, spec = _tree.flatten((args, kwargs))
        for i, t in enumerate(leaves):
            if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
                leaves[i] = t.detach().requires_grad_()
        args, kwargs = _tree.unflatten(spec, leaves)
    with torch.enable_grad(), torch.random.fork_rng(_cuda_devices()):
        return fun(*args, **kwargs), args, kwargs


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def saved_residuals(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Residual]:
    """List what is held in memory between the forward and the backward of a function.

    The function runs, and each storage is listed that its open graph holds: what it computed and saved, and the
    arguments and captured tensors that the backward reads, which are there anyway. Functions under remat in it are
    seen with what their policies keep.

    Gradients are those that a `.backward()` would take. Where neither an argument nor a captured tensor requires grad,
    they are taken of all arguments.

    **Arguments:**

    - `fun`: any function: under remat, with calls of such functions in it, or plain.
    - `args`, `kwargs`: what it is called with.

    **Returns:** the residuals, each storage once: arguments, captured tensors, and what was computed.

    **Raises:** `RematError` inside of a transform of `torch.func`.

    **Source:** `jax.ad_checkpoint.saved_residuals`.

    Examples:
        >>> import torch
        >>> from remat import checkpoint_name, policies, remat, saved_residuals
        >>> def block(w, x):
        ...     return torch.sin(checkpoint_name(x @ w, "hidden"))
        >>> w, x = torch.eye(2), torch.ones(3, 2)
        >>> [r.why for r in saved_residuals(block, w, x)]
        ['from the argument w', 'from the argument x', "named 'hidden'"]
        >>> [r.why for r in saved_residuals(remat(block), w, x)]
        ['from the argument w', 'from the argument x']
    """
    here = call_site()
    with _set(watching, watching.get() or _Watched(_ignore)):
        origins = _Origins()
        with origins:
            out, args, kwargs = _forward(fun, args, kwargs)
    held = _Held(_Names(fun, args, kwargs), origins)
    roots = _roots(out)
    out = None
    nodes = internals.nodes_behind(roots)
    for t in internals.saved_tensors(nodes):
        if t.layout == torch.strided:
            held.add_saved(t, here)
    for node in nodes:
        link = getattr(node, "link", None)
        if link is not None and isinstance(getattr(getattr(link, "fn", None), "call", None), Call):
            held.add_kept(link.fn.call)
    held.add_made()
    return sorted(held.residuals, key=lambda r: held.names.rank(r.why))


def _ignore(message: str) -> None:
    """Not said."""


# Tables.


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> str:
    """Rows in aligned columns; those in `left` begin, the others end, at the same place."""
    columns = []
    for i, column in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, column))
        columns.append([c.ljust(width) if i in left else c.rjust(width) for c in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _units(n: float, step: int, units: str) -> str:
    for unit in units.split():
        if n < step or unit == units.split()[-1]:
            return f"{n:.0f} {unit}" if float(n).is_integer() and n < step else f"{n:.1f} {unit}"
        n /= step
    raise AssertionError


def _size(nbytes: int) -> str:
    return _units(nbytes, 1024, "B KiB MiB GiB TiB")


def _flops_text(flops: int) -> str:
    return _units(flops, 1000, "FLOP kFLOP MFLOP GFLOP TFLOP PFLOP")


def _format(residuals: Sequence[Residual]) -> str:
    rows = [
        (_size(r.nbytes), f"{str(r.dtype).removeprefix('torch.')}{list(r.shape)}", str(r.device), r.why, r.where)
        for r in residuals
    ]
    return _table(("size", "tensor", "device", "why", "where"), rows, left=(1, 2, 3, 4))


def _total(residuals: Iterable[Residual]) -> int:
    return sum(r.nbytes for r in residuals if r.computed)


class _Flops(internals.TorchDispatchMode):
    """Adds up the floating point operations of the ops that run, as torch's flop counter knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += _flops_of(func, args, kwargs or {}, out)
        return out


def _flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def _flops_of_gradient(fun: Callable[..., Any], args: Any, kwargs: Any) -> int:
    _, args, kwargs = _forward(fun, args, kwargs)
    with torch.enable_grad(), torch.random.fork_rng(_cuda_devices()), _Flops() as flops:
        out = fun(*args, **kwargs)
        results = [t for t in _tensors(out) if t.requires_grad]
        leaves = [n.variable for n in internals.nodes_behind(_roots(out)) if _is_leaf(n)]
        out = None
        if results:
            torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], allow_unused=True)
    return flops.total


def print_saved_residuals(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Print what `saved_residuals` lists, with the total, and what remat wins and costs.

    Below the table are the bytes that the function computes and holds, the same without remat, and the floating point
    operations that the backward repeats, as far as `torch.utils.flop_counter` knows the ops. Then the classic
    mistakes, where there are any: see `REMAT_LOG` in the documentation.

    **Arguments:**

    - `fun`: the function, as of `saved_residuals`. It and its backward run twice; no `.grad` changes.
    - `args`, `kwargs`: what it is called with.

    **Raises:** as `saved_residuals`.

    **Source:** `jax.ad_checkpoint.print_saved_residuals`.

    Examples:
        >>> import torch
        >>> from remat import print_saved_residuals, remat
        >>> print_saved_residuals(remat(lambda w, x: torch.sin(x @ w)), torch.eye(2), torch.ones(3, 2))
        size  tensor ...
        16 B  float32[2, 2]  cpu     from the argument w  ...
        24 B  float32[3, 2]  cpu     from the argument x  ...
        held besides arguments and captured tensors: 0 B; without remat: 24 B
        recomputed on backward: 24 FLOP of 72 FLOP
        ...
    """
    mistakes: list[str] = []
    with _set(watching, _Watched(mistakes.append)):
        residuals = saved_residuals(fun, *args, **kwargs)
        flops = _flops_of_gradient(fun, args, kwargs)
    with _set(plainly, True):
        plain = saved_residuals(fun, *args, **kwargs)
        plain_flops = _flops_of_gradient(fun, args, kwargs)
    held, held_plainly = _size(_total(residuals)), _size(_total(plain))
    lines = [
        _format(residuals),
        f"held besides arguments and captured tensors: {held}; without remat: {held_plainly}",
        f"recomputed on backward: {_flops_text(flops - plain_flops)} of {_flops_text(plain_flops)}",
        *dict.fromkeys(mistakes),
    ]
    print("\n".join(lines))


# REMAT_LOG=residuals.

_log = logging.getLogger("remat")
_warned: set[str] = set()
_with_others_inside: weakref.WeakSet[Run] = weakref.WeakSet()


def _make_visible() -> None:
    """Who asks for the log wants to see it."""
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _make_visible()
        _log.warning(message)


def _inform(message: str) -> None:
    _make_visible()
    _log.info(message)


_SMALL = 4  # what comes after a call is small beside what the call drops: a quarter of it

_WHOLE = (
    "remat: {name} ({where}) is nearly all of what is differentiated, and runs again right after its forward: at that "
    "moment all of its values ({size}) are there after all. Put parts of it under remat, one by one."
)
_LAST = (
    "remat: {name} ({where}) runs again right after its forward: what comes after it is small ({after}), so dropping "
    "its values ({size}) lowers no peak. Leave the last block without remat."
)
_NOTHING = (
    "remat: the policy {policy} matches nothing in {name} ({where}): nothing is kept. `list_ops` lists the ops, and "
    "names are given with `checkpoint_name`."
)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


class _Watched:
    """A call that is watched: `call -> what sees its result`."""

    def __init__(self, warn: Callable[[str], None], info: Callable[[str], None] | None = None) -> None:
        self.warn = warn
        self.info = info

    def __call__(self, fun: Any, call: Call, run: Run, out: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        _with_others_inside.update(active_runs())
        where = call_site()
        with internals.DisableTorchFunction():
            nodes = internals.nodes_behind((n for t in _tensors(out) for n in internals.nodes_of(t)), call.since)
            found = [t for t in internals.saved_tensors(nodes) if t.layout == torch.strided]
            saved = {id(s): s for s in (t.untyped_storage() for t in found)}
        del nodes, found
        others_inside = run in _with_others_inside
        in_rerun = run.in_rerun

        def see(out: Any) -> None:
            if in_rerun or not call.originals:
                return
            with internals.DisableTorchFunction():
                operands = [t for ref in call.originals if (t := ref()) is not None]
                raw = [t for t in map(internals.innermost, operands) if t.layout == torch.strided]
                for t in raw:
                    saved.pop(id(t.untyped_storage()), None)
                for kept in call.tape.kept.values() if call.tape is not None else ():
                    saved.pop(id(kept.memory.untyped_storage()), None)
                drops = sum(s.nbytes() for s in saved.values())
                saved.clear()
                if self.info is not None:
                    held = _Held(_Names(fun, args, kwargs), None)
                    for t in raw:
                        held.add_saved(t, where)
                    held.add_kept(call)
                    keeps = _size(_total(held.residuals))
                    self.info(
                        f"remat: {call.name} ({where}) keeps {keeps} and drops {_size(drops)}, besides arguments and "
                        f"captured tensors\n{_format(held.residuals)}"
                    )
                if drops:
                    self._check_policy(call, where)
                    if not others_inside:
                        self._check_place(call.name, where, drops, out)

        return see

    def _check_policy(self, call: Call, where: str) -> None:
        if call.tape is not None and not call.tape.matched and call.policy != nothing_saveable:
            self.warn(_NOTHING.format(policy=call.policy, name=call.name, where=where))

    def _check_place(self, name: str, where: str, drops: int, out: Any) -> None:
        """See, when the backward comes to the call, what came after it."""
        pairs = [(t, n) for t in _tensors(out) for n in internals.nodes_of(t)]
        if not pairs:
            return
        result, node = pairs[0]
        batch = internals.innermost(result).numel() // max(result.numel(), 1)  # nodes know nothing of a vmap around
        number, thread, warn = internals.sequence_number(node), threading.get_ident(), self.warn

        def check(cotangents: Any) -> None:
            nodes = [n for n in internals.nodes_behind(internals.running_backward(thread)) if not _is_leaf(n)]
            if number not in map(internals.sequence_number, nodes):
                return
            after = batch * sum(internals.bytes_made_by(n) for n in nodes if internals.sequence_number(n) > number)
            if after * _SMALL < drops:
                before = any(internals.sequence_number(n) < number for n in nodes)
                message = _LAST if before else _WHOLE
                warn(message.format(name=name, where=where, size=_size(drops), after=_size(after)))

        node.register_prehook(check)


# Ops.


@dataclass(frozen=True)
class OpCost:
    """What an op costs in one run of a function.

    **Attributes:**

    - `op`: the name by which policies know it: "aten.mm.default".
    - `count`: how often it runs.
    - `nbytes`: bytes of all that it returned; none for a view.
    - `flops`: floating point operations, as far as `torch.utils.flop_counter` knows the op.
    - `seconds`: the time that it took.

    Examples:
        >>> import torch
        >>> from remat import list_ops
        >>> list_ops(torch.mm, torch.eye(3), torch.ones(3, 2))[0].flops
        36
    """

    op: str
    count: int
    nbytes: int
    flops: int
    seconds: float


@dataclass(frozen=True, repr=False)
class OpCosts(Sequence[OpCost]):
    """The ops of a function, the most expensive first: a sequence of `OpCost`.

    **Attributes:**

    - `ops`: the same as a tuple.

    Examples:
        >>> import torch
        >>> from remat import list_ops
        >>> ops = list_ops(lambda x: torch.sin(x).exp(), torch.ones(3))
        >>> sorted(o.op for o in ops)
        ['aten.exp.default', 'aten.sin.default']
    """

    ops: tuple[OpCost, ...]

    @overload
    def __getitem__(self, i: int) -> OpCost: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[OpCost]: ...
    def __getitem__(self, i: int | slice) -> OpCost | Sequence[OpCost]:
        return self.ops[i]

    def __len__(self) -> int:
        return len(self.ops)

    def __repr__(self) -> str:
        rows = [
            (o.op, str(o.count), _size(o.nbytes), _flops_text(o.flops), _units(o.seconds * 1e9, 1000, "ns us ms s"))
            for o in self.ops
        ]
        return _table(("op", "count", "size", "FLOPs", "time"), rows, left=(0,))


class _Costs(internals.TorchDispatchMode):
    """Weighs the ops that policies are asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[str, OpCost] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter()
        out = func(*args, **kwargs)
        for device in {t.device for t in _tensors(out) if t.device.type not in ("cpu", "meta")}:
            torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - start
        if func is torch.ops.aten.detach.default or current_name() is not None:
            return out
        given = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        made = {id(s): s.nbytes() for t in _tensors(out) if id(s := t.untyped_storage()) not in given}
        old = self.costs.get(str(func), OpCost(str(func), 0, 0, 0, 0.0))
        self.costs[str(func)] = OpCost(
            old.op,
            old.count + 1,
            old.nbytes + sum(made.values()),
            old.flops + _flops_of(func, args, kwargs, out),
            old.seconds + seconds,
        )
        return out


def list_ops(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> OpCosts:
    """List the ops that a policy can name in a function, with what they cost.

    They are the ops of the forward, below autograd and below every transform in the function. Under a `vmap` or `grad`
    around it they may be others: `mm` becomes `bmm`. List those with `list_ops(vmap(fun), ...)`.

    **Arguments:**

    - `fun`: any function, under remat or not.
    - `args`, `kwargs`: what it is called with. It runs twice or more, and the last run is measured.

    **Returns:** the ops, those that took the longest first. Printed, they are a table.

    **Raises:** `RematError` inside of a transform of `torch.func`.

    Examples:
        >>> import torch
        >>> from remat import list_ops
        >>> print(list_ops(lambda w, x: torch.sin(x @ w), torch.eye(64), torch.ones(32, 64)))
        op                count   size        FLOPs     time
        aten...
        >>> from remat.policies import save_ops
        >>> save_ops(*[o.op for o in list_ops(torch.mm, torch.eye(3), torch.eye(3)) if o.flops])
        save_ops('aten.mm.default')
    """
    with _set(plainly, True):
        _, args, kwargs = _forward(fun, args, kwargs)
        with torch.enable_grad(), torch.random.fork_rng(_cuda_devices()), _Costs() as costs:
            fun(*args, **kwargs)
    return OpCosts(tuple(sorted(costs.costs.values(), key=lambda o: -o.seconds)))


logging_watch = _Watched(_warn_once, _inform)
"""What logs residuals and mistakes."""

if "residuals" in os.environ.get("REMAT_LOG", "").split(","):  # once: at each call it would cost as much as a small op
    watchers.append(logging_watch)
