"""Functions of which the code shows what they do: compute on their arguments and on what they visibly hold.

A run of such a function need not be watched. It reads its arguments, tensors in its cells and globals and those of the
modules that it uses, and draws from the global generators at most. So that this can be told, all that the code names
has to be known: the operations and the methods of containers in `remat._code`, globals and cells that hold modules,
tensors, numbers or functions of the same kind, under remat or not, and attributes of those modules and of settings,
which are objects that do nothing by themselves. Anything else (another library, an attribute that is set, an assignment
to a slice) is not known, and the function is watched. An operation that is told to work in place by a value that the
code gets from elsewhere can still change a tensor: who relies on the answer has to look at the versions of those that
the function reads.

The answer belongs to the code and to what it found. It is kept, and checked at each call.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import operator
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat import _torch_internals as internals
from remat._code import ACCESS, CHANGES_CONTAINERS, DRAWS, KNOWN_NAMES, MAY_BE_INPLACE, OPS, asks_alone, names_of
from remat._frozen import ATOMS
from remat._stock import (
    BUILTINS,
    CALLS,
    CONTAINERS,
    NORMS,
    OF_TENSORS,
    ORIGINALS,
    PRIVATE,
    SPACES,
    STOCK,
    are_called_otherwise,
    calls_of,
    has_operators,
    is_of_torch,
    is_settings,
    is_stock,
    operations,
)

_MISSING: Any = object()
_CONSTANTS = ATOMS | {torch.dtype, torch.device, torch.Size, type(Ellipsis), type(_MISSING)}


_Meaning = Any
"""What a name meant: a weak reference; or a type, for of a number only the type counts; of a tuple, these; or False."""


def _meaning(value: Any) -> _Meaning:
    if type(value) is tuple:
        return tuple(map(_meaning, value))
    if type(value) in _CONSTANTS:
        return type(value)
    try:
        return weakref.ref(value)
    except TypeError:  # a property, a range, a number of NumPy's
        raise _Unknown from None


def _still(meaning: _Meaning, value: Any) -> bool:
    if type(meaning) is weakref.ref:
        return value is meaning()
    if type(meaning) is tuple:
        return type(value) is tuple and len(value) == len(meaning) and all(map(_still, meaning, value))
    return type(value) is meaning if isinstance(meaning, type) else value is meaning


def _size(owner: Any) -> tuple[int, int]:
    """What changes with the class of an object, and with the number of its names."""
    return id(type(owner)), len(getattr(owner, "__dict__", ()))


def _is_in_package(names: dict[str, Any], name: str, *attributes: str) -> bool:
    """Whether a global with attributes is in a package that is not known, or is such: `torch.nn.init`."""
    value = names.get(name)
    for attribute in attributes:
        if not isinstance(value, types.ModuleType):
            return False
        if id(value) not in operations():
            return True
        value = getattr(value, attribute, None)
    return isinstance(value, types.ModuleType)  # it is handed on


def _is_made_again_by_slices(module: nn.Module) -> bool:
    """Whether a slice of a module calls an `__init__` of the user's."""
    return isinstance(module, (nn.Sequential, *CONTAINERS)) and any(
        "__init__" in vars(kind) for kind in type(module).__mro__ if not is_stock(kind)
    )


class Reads:
    """What is known of a function, and what that depends on.

    **Attributes:**

    - `is_known`: whether the code shows what it does. The others count only then.
    - `tensors`: where modules hold the tensors that it may read: a weak reference, whether it is a parameter (else a
        buffer), and the name.
    - `global_tensors`: names of tensors that are globals, of the function itself (owner: a number, of a root) or of
        others (owner: a weak reference).
    - `has_modules`: whether it uses modules.
    - `changes_containers`: whether it may change a list or a dict.
    - `draws`: whether it may draw from the global generators.
    - `nests`: whether it may call functions under remat.
    - `gives_memory_away`: whether it may read a tensor's memory without an op.
    - `may_run_below`: False once a call of it has shown that it can't run below a transform.
    - `may_write`: whether an argument that is True may tell it to work in place.
    - `unpacks`: whether the keys of an argument may (`**options`).
    - `asked`: the names of attributes that it may ask for.
    - `statistics`: modules that write to their buffers in training, and read nothing of them then: weak references.
    - `names`: names that may come to mean something else: globals of the function itself (owner: a number, of a root),
        numbers in globals of others, and numbers in modules (owner: a weak reference).
    """

    def __init__(self, roots: list[Any], bound: Any = None) -> None:
        """`bound`: the module that is asked for what it has, and not called: its `forward` need not be known."""
        self.is_known = False
        self.may_run_below = True
        self.unpacks = False
        self.nests = False
        self.tensors: list[tuple[weakref.ref[nn.Module], bool, str]] = []
        self.global_tensors: list[tuple[Any, str]] = []
        self.statistics: list[weakref.ref[nn.Module]] = []
        self.names: list[tuple[Any, str]] = []
        self._shapes: list[tuple[weakref.ref[nn.Module], Any]] = []
        self._sizes: list[tuple[weakref.ref[Any], tuple[int, int]]] = []  # of classes and settings
        self._globals: list[tuple[Any, str, _Meaning]] = []  # of a root, by its number, or of another function
        self._attributes: list[tuple[weakref.ref[Any], str, _Meaning]] = []
        self._operations: list[tuple[Mapping[str, Any], str]] = []
        self._meant: list[Any] = []  # by these
        self._codes: list[tuple[weakref.ref[types.FunctionType], tuple[Any, ...]]] = []  # of others
        self._names: set[str] = set()
        self._functions: dict[int, types.FunctionType] = {}
        self._modules: dict[int, nn.Module] = {}
        self._settings: dict[int, Any] = {}
        self._kinds: set[type] = set()
        self._stock: set[int] = set()
        self._looked_up: set[tuple[int, str]] = set()
        self._uses_super = self._compares = self._slices = False
        self._bound = bound
        self._roots = {id(root): i for i, root in enumerate(roots)}
        self._keeps_identities = [root.__code__ for root in roots if type(root) is types.FunctionType]
        with contextlib.suppress(
            _Unknown, RecursionError
        ):  # of functions that call each other by name, a thousand deep
            self._search(roots)
        for module in self._modules.values() if self.is_known else ():
            for is_parameter, names in ((True, module._parameters), (False, module._buffers)):
                read = names if id(module) in self._stock else [name for name in names if name in self._names]
                self.tensors += [(weakref.ref(module), is_parameter, name) for name in read]
        self.has_modules = bool(self._shapes)
        self.changes_containers = bool(self._names & CHANGES_CONTAINERS)
        self.asked = frozenset(self._names)
        self.draws = bool(self._names & DRAWS)
        self.gives_memory_away = not self._names.isdisjoint(ACCESS)
        self.may_write = bool(self._names & MAY_BE_INPLACE)
        del self._functions, self._modules, self._settings, self._kinds, self._stock, self._roots, self._names
        del self._looked_up, self._bound

    def holds(self, roots: list[Any], hooks_count: bool = True) -> bool:
        """Whether all that it depends on is as it was. `hooks_count`: whether modules may not have got hooks."""
        for at, name, meaning in self._globals:
            function = roots[at] if type(at) is int else at()
            if function is None or not _still(meaning, function.__globals__.get(name, _MISSING)):
                return False
        if self._shapes and not internals.have_shapes(self._shapes, hooks_count):
            return False
        for ref, size in self._sizes:
            if _size(ref()) != size:
                return False
        for function_ref, parts in self._codes:  # a notebook that reloads puts others there
            function = function_ref()
            if function is None or not _is_made_of(function, parts):
                return False
        if [space.get(name) for space, name in self._operations] != self._meant:
            return False
        for ref, name, meaning in self._attributes:
            owner = ref()
            if owner is None or not _still(meaning, owner.__dict__.get(name, _MISSING)):
                return False
        return True

    def same_as(self, other: Reads) -> bool:
        """Whether the same was found out, from the same: a module may have got an attribute that is not read."""
        pairs: list[tuple[list[Any], list[Any]]] = [
            (self.tensors, other.tensors),
            (self.global_tensors, other.global_tensors),
            (self.names, other.names),
            (self._globals, other._globals),
            (self._attributes, other._attributes),
            (self._codes, other._codes),
            (self._children(), other._children()),
        ]
        return all(len(mine) == len(theirs) and all(x in theirs for x in mine) for mine, theirs in pairs)

    def _children(self) -> list[tuple[weakref.ref[nn.Module], Any]]:
        """Of modules, the names and the identities of their children."""
        return [(module, shape and shape[-1]) for module, shape in self._shapes]

    def _search(self, roots: list[Any]) -> None:
        for root in roots:
            self._take(root)
        while new := self._not_looked_up():
            self._looked_up |= new
            owners = self._modules | self._settings
            for key, name in new:
                self._attribute(owners[key], name, is_known=name == "forward" and key in self._stock)
        for name in self._names & KNOWN_NAMES:
            now = [space.get(name) for space in SPACES]
            was_replaced = any(map(operator.is_not, now, ORIGINALS[name]))
            if name in OPS or was_replaced:
                found = zip(SPACES, now, strict=True)
                checked = [(s, op) for s, op in found if op is not None or s is OF_TENSORS]
                self._operations += [(s, name) for s, _ in checked]
                self._meant += [op for _, op in checked]
            if was_replaced:
                raise _Unknown
        if self._slices and any(map(_is_made_again_by_slices, self._modules.values())):
            raise _Unknown
        if any(not self._names.isdisjoint(vars(function)) for function in self._functions.values()):
            raise _Unknown  # what is asked for may be an attribute of a function
        unknown = self._names - KNOWN_NAMES
        owned = {n for o in (*self._modules.values(), *self._settings.values()) for n in _names_of(o)}
        if unknown <= owned and not any(map(is_of_torch, unknown)):
            self.is_known = True

    def _not_looked_up(self) -> set[tuple[int, str]]:
        """Of modules and settings, the names that have not been looked for in them."""
        if self._compares:  # objects, by their fields
            self._names.update(*(vars(s) for s in self._settings.values() if is_dataclass(s)))
        return set(itertools.product((*self._modules, *self._settings), self._names)) - self._looked_up

    def _take(self, value: Any) -> None:
        """Something that the function can reach."""
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                self._modules[id(value)] = value
                self._module(value)
            elif value is self._bound:  # by another name than `self`
                self._bound = None
                self._attribute(value, "forward")
        elif _runs_again(value):
            self.nests = True
            if hasattr(value, "__wrapped__"):
                self._take(value.__wrapped__)
        elif isinstance(value, types.FunctionType) and id(value) not in operations():
            if id(value) not in self._functions:
                self._functions[id(value)] = value
                self._function(value)
        elif id(value) in operations():
            self._names |= {getattr(value, "__name__", "")} & DRAWS
        elif type(value) not in _CONSTANTS:
            if not is_settings(value):
                raise _Unknown
            if id(value) not in self._settings:
                self._settings[id(value)] = value
                self._sizes.append((_meaning(value), _size(value)))
                self._take_kinds(type(value).__mro__[:-1])

    def _take_kinds(self, kinds: Iterable[type]) -> None:
        """Classes: what they have got is known."""
        new = [kind for kind in kinds if kind not in self._kinds]
        self._kinds.update(new)
        self._sizes += [(weakref.ref(kind), _size(kind)) for kind in new]

    def _function(self, function: types.FunctionType) -> None:
        names = names_of(function.__code__)
        if names is None or any(type(d) not in _CONSTANTS for d in _defaults(function)):
            raise _Unknown
        if function.__closure__ and id(function) not in self._roots and function.__code__.co_freevars != ("__class__",):
            raise _Unknown
        if "super" in names.globals and not self._uses_super:
            self._uses_super = True
            self._looked_up.clear()
        of_torch = str(function.__globals__.get("__name__")).startswith("torch.")
        if id(function) not in self._roots and not of_torch:
            self._codes.append((weakref.ref(function), made_of(function)))
        self._names |= names.attributes
        self._compares |= names.compares
        self._slices |= names.slices
        self.unpacks |= names.unpacks
        if any(_is_in_package(function.__globals__, *path) for path in names.paths):
            raise _Unknown
        for name in names.globals:
            value = function.__globals__.get(name, _MISSING)
            at = self._roots[id(function)] if id(function) in self._roots else weakref.ref(function)
            if type(value) in _TENSORS:
                self._globals.append((at, name, type(value)))
                self.global_tensors.append((at, name))
                continue
            if not of_torch:
                self._globals.append((at, name, _meaning(value)))
            if value is not _MISSING:
                self._take(value)
                if id(value) not in operations() and (type(at) is int or type(value) in _CONSTANTS):
                    self.names.append((at, name))
            elif getattr(builtins, name, _MISSING) not in BUILTINS:
                raise _Unknown

    def _module(self, module: nn.Module) -> None:
        kind, shape = type(module), internals.shape_of_module(module)
        self._shapes.append((weakref.ref(module), shape))
        self._take_kinds(k for k in kind.__mro__ if not is_stock(k))
        if (
            calls_of(kind) != CALLS
            or "_call_impl" in vars(module)
            or kind.__getattribute__ is not object.__getattribute__
            or shape is None
            or any(map(has_operators, kind.__mro__))
        ):
            raise _Unknown
        if kind in STOCK:
            self._take_stock(module)
            return
        if kind not in CONTAINERS and module is not self._bound:
            self._attribute(module, "forward")
        if isinstance(module, (nn.Sequential, *CONTAINERS)):  # others are asked for their children by name
            for child in module.children():
                self._take(child)

    def _take_stock(self, module: Any) -> None:
        """A module that is known: it computes on all that it holds."""
        kind = type(module)
        if kind not in {type(self._modules[key]) for key in self._stock}:
            self._operations += [(space, name) for space, name, _ in STOCK[kind]]
            self._meant += [space[name] for space, name, _ in STOCK[kind]]
        if any(space[name] is not part for space, name, part in STOCK[kind]):
            raise _Unknown
        if kind is nn.Embedding and module.max_norm is not None:
            raise _Unknown
        self._stock.add(id(module))
        self._attribute(module, "forward", is_known=True)
        for name, value in vars(module).items():
            if name not in PRIVATE and type(value) is not list:
                self._attribute(module, name)
        if kind in NORMS:
            self.statistics.append(weakref.ref(module))
        if kind is nn.MultiheadAttention:
            self._names.add("dropout")
        for child in module.children():
            self._take(child)

    def _attribute(self, module: Any, name: str, is_known: bool = False) -> None:
        """What the function finds if it looks for a name in a module, or in its `super()`, or in settings.

        **Arguments:**

        - `is_known`: whether it is known what that does.
        """
        missing: list[Any] = []
        for owner in (module, *type(module).__mro__):
            if name not in vars(owner):
                missing.append(owner)
                continue
            if owner is nn.Module and (name in KNOWN_NAMES or name == "forward"):
                break  # it is a tensor's: `x.float()`; there is no other `forward`
            if owner is nn.ModuleDict and name in ("items", "keys", "values"):
                break
            if owner in (nn.Sequential, *CONTAINERS) and name in CHANGES_CONTAINERS:
                break  # it is a list's: a module with other children is told by its shape
            value = vars(owner)[name]
            if owner is module and any(hasattr(type(vars(k).get(name)), "__set__") for k in type(module).__mro__):
                raise _Unknown  # Python asks the descriptor
            if name == "inplace" and value is not False:
                raise _Unknown
            entry = weakref.ref(owner), name, False if name == "inplace" else _meaning(value)
            # Of the module itself, its shape tells that it has got a name.
            absent = [(weakref.ref(kind), name, type(_MISSING)) for kind in missing if kind is not module]
            for e in (*absent, entry):
                if owner is module or e not in self._attributes:  # modules have their classes in common
                    self._attributes.append(e)
            for item in value if type(value) is tuple else () if is_known else (value,):
                self._take(item)
            if module is self._bound and owner is not module and not _is_asked_alone(value):
                self._bound = None
                self._attribute(module, "forward")
            if type(value) in _CONSTANTS or type(value) is tuple:
                if owner is not module:
                    raise _Unknown
                self.names.append((weakref.ref(module), name))
            if not self._uses_super:
                break
        else:
            child = module._modules.get(name) if isinstance(module, nn.Module) else None
            if child is not None:
                self._take(child)


runs_again: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions that call others under remat, those they wrap or are given, and do nothing else."""


def _runs_again(value: Any) -> bool:
    """Whether it is one of these, or a function under remat of which no more has to be known."""
    kind = type(value)
    if kind is types.FunctionType:
        return value in runs_again
    return "__remat_is_plain__" in vars(kind) and value.__remat_is_plain__


class _Unknown(Exception):  # noqa: N818
    """Something is not known."""


def _names_of(owner: Any) -> Iterator[str]:
    yield from vars(owner)
    if isinstance(owner, nn.Module):
        yield from (*owner._parameters, *owner._buffers, *owner._modules)
    for kind in type(owner).__mro__:
        if kind is not nn.Module and kind is not object:
            yield from vars(kind)


_found: dict[Any, Reads] = {}


def reads(fun: Any, roots: list[Any] | None = None) -> Reads | None:
    """What is known of a function, a module or a method of a module. None: it has to be watched.

    **Arguments:**

    - `roots`: where to put the function and, in order, the functions and modules in its cells.
    """
    roots = [] if roots is None else roots
    key = _key(fun, roots)
    if key is None:
        return None
    found = _found.get(key)
    if found is not None and not found.holds(roots):
        found = None
    if (found is None or found.has_modules) and are_called_otherwise():
        return None
    if found is None:
        if len(_found) > 1000:
            _found.clear()
        found = _found[key] = Reads(roots, _asked_alone(fun))
    return found if found.is_known else None


def _asked_alone(fun: Any) -> Any:
    """The module whose method it is, if that does not call it or hand it on."""
    return fun.__self__ if type(fun) is types.MethodType and _is_asked_alone(fun.__func__) else None


def _is_asked_alone(method: Any) -> bool:
    return type(method) is types.FunctionType and asks_alone(method.__code__)


def roots_of(fun: Any) -> list[Any]:
    """The function and, in order, functions and modules in its cells; nothing where one of these is of another kind."""
    roots: list[Any] = []
    return [] if _key(fun, roots) is None else roots


def still(fun: Any, roots: list[Any], before: Reads, parts: list[tuple[Any, ...]], hooks_count: bool) -> bool:
    """Whether a function does what it did.

    **Arguments:**

    - `roots`: of the function.
    - `parts`: what they were made of.
    - `hooks_count`: whether modules may not have got hooks.
    """
    if len(roots) != len(parts) or not all(map(_is_made_of, roots, parts)):
        return False
    if before.has_modules and are_called_otherwise(hooks_count):
        return False
    if before.holds(roots, hooks_count):
        return True
    now = reads(fun)
    return now is not None and now.same_as(before)


def made_of(root: Any) -> tuple[Any, ...]:
    """Code, defaults and names of attributes of a function; nothing of a module, whose class has them."""
    return (root.__code__, *_defaults(root), *root.__dict__) if type(root) is types.FunctionType else ()


def _is_made_of(root: Any, parts: tuple[Any, ...]) -> bool:
    now = made_of(root)
    return len(now) == len(parts) and all(map(operator.is_, now, parts))


Value = tuple[dict[str, Any], str, Any]
"""A namespace, a name, and what it means there."""


def values(reads: Reads, roots: list[Any]) -> list[Value]:
    """What the names mean now that may come to mean something else."""
    found: list[Value] = []
    for at, name in reads.names:
        namespace = _namespace(at, roots)
        found.append((namespace, name, namespace[name]))
    return found


def _namespace(at: Any, roots: list[Any]) -> dict[str, Any]:
    """Globals of a function, or what a module or settings have: of a root, by its number, or of another."""
    owner = roots[at] if type(at) is int else at()
    return owner.__globals__ if isinstance(owner, types.FunctionType) else vars(owner)


def places(reads: Reads, roots: list[Any]) -> list[Value]:
    """Where modules and globals hold the tensors that the function reads."""
    found: list[Value] = []
    for at, name in reads.global_tensors:
        namespace = _namespace(at, roots)
        found.append((namespace, name, namespace[name]))
    for ref, is_parameter, name in reads.tensors:
        module: Any = ref()
        if not is_parameter and module.training and ref in reads.statistics:
            continue
        namespace = module._parameters if is_parameter else module._buffers
        found.append((namespace, name, namespace.get(name)))
    return found


def written(reads: Reads) -> list[Value]:
    """The buffers that modules will write to: places, as of `places`."""
    modules = [module for ref in reads.statistics if (module := ref()) is not None and module.training]
    return [(m._buffers, name, buffer) for m in modules for name, buffer in m._buffers.items() if buffer is not None]


def counters(reads: Reads) -> list[Tensor]:
    """Of modules that read their statistics, what counts how often these were written to: their versions do not."""
    modules: list[Any] = [m for ref in reads.statistics if (m := ref()) is not None and not m.training]
    return [m.num_batches_tracked for m in modules if m.num_batches_tracked is not None]


def _key(fun: Any, roots: list[Any]) -> Any:
    """What the answer for a function depends on, apart from names: its code, and what its cells hold."""
    kind = type(fun)
    if roots and any(fun is root for root in roots):
        return kind
    if kind is types.FunctionType:
        roots.append(fun)
        key: tuple[Any, ...] = id(fun.__globals__), id(fun.__code__)
        if fun.__defaults__ or fun.__kwdefaults__:
            key = *key, *map(type, _defaults(fun))
        if fun.__dict__:
            key = *key, *fun.__dict__
        if not fun.__closure__:
            return key
        try:
            contents = [cell.cell_contents for cell in fun.__closure__]
        except ValueError:  # an empty cell
            return None
        keys = [Tensor if type(c) in _TENSORS else _key_of_content(c, roots) for c in contents]
        return None if None in keys else (*key, *keys)
    if isinstance(fun, nn.Module):
        roots.append(fun)
        return id(fun)
    if kind is types.MethodType and isinstance(fun.__self__, nn.Module):
        parts = _key(fun.__func__, roots), _key(fun.__self__, roots)
        return None if None in parts else parts
    if id(fun) in operations():
        roots.append(fun)
        return id(fun)
    if roots and _runs_again(fun):
        roots.append(fun)
        wrapped = _key(fun.__wrapped__, roots)
        return None if wrapped is None else (kind, wrapped)
    return None


def _key_of_content(content: Any, roots: list[Any]) -> Any:
    """Of what a cell, or a tuple in a cell, holds: not of a tensor."""
    if type(content) in _CONSTANTS:
        return type(content)
    if type(content) is tuple:
        keys = tuple([_key_of_content(c, roots) for c in content])
        return None if None in keys else keys
    return _key(content, roots)


def _defaults(fun: types.FunctionType) -> tuple[Any, ...]:
    defaults, named = fun.__defaults__ or (), fun.__kwdefaults__
    return (*defaults, *named.values()) if named else defaults


_TENSORS = {Tensor, nn.Parameter}
