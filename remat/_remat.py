"""The decorator."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from remat import _compile, _tree
from remat import _torch_internals as internals
from remat._call import Call
from remat._derived import Derived
from remat._errors import call_site, function_name, shown
from remat._look import Look
from remat._module import wrapped_twin
from remat._nested_mode import current_look
from remat._operands import Found
from remat._primitive import attach
from remat._static import StaticArguments, as_tuple
from remat.policies import Policy, as_policy
from remat.policies._policy import PolicyLike

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

plainly: ContextVar[bool] = ContextVar("remat_plainly", default=False)
"""True while functions under remat run without it, to list what they would save then."""

Watch = Callable[[Any, Call, Any, Any, Any], Callable[[Any], None]]
"""Called as `watch(fun, call, out, args, kwargs)` after each forward; returns a callback for the attached result."""
watching: ContextVar[Watch | None] = ContextVar("remat_watching", default=None)
"""The watcher of this context."""
watchers: list[Watch] = []
"""Watchers for contexts that set none."""


@dataclass(frozen=True)
class _Options:
    policy: PolicyLike
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    preserve_rng_state: bool

    def __call__(self, forward: Callable[..., Any]) -> Any:
        """`forward` of a class of modules, under remat: a method, with `self` as one more argument."""
        return Remat(forward, replace(self, static_argnums=tuple(n + (n >= 0) for n in self.static_argnums)))


class Remat(Generic[P, R]):
    """A function under remat: it runs again on backward instead of storing its activations."""

    __wrapped__: Callable[P, R]

    def __init__(self, fun: Callable[P, R], options: _Options) -> None:
        traced = _compile.tracing()
        if traced:  # dynamo can't copy attributes of functions (2.11), name a builtin, or inspect a signature
            self.__wrapped__ = fun
        else:
            functools.update_wrapper(self, fun, updated=("__dict__",) if isinstance(fun, types.FunctionType) else ())
        self._options = options
        self._name = "a function" if traced else function_name(fun)
        self._policy = None if options.policy is None or traced else as_policy(options.policy)
        nums, names = options.static_argnums, options.static_argnames
        self._static = StaticArguments(fun, self._name, nums, names) if (nums or names) and not traced else None

    def __remat_maker__(self) -> Callable[[Callable[P, R]], Remat[P, R]]:
        """Return a decorator with the options and attributes of this object, for another function."""
        maker = _Maker(vars(self))
        maker.pop("_function", None)
        del maker["__wrapped__"]
        return maker

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        fun = self.__wrapped__
        if _compile.tracing():
            return _compile.call(remat, self._options.policy, self._options.preserve_rng_state, fun, args, kwargs)
        if not torch.is_grad_enabled() or plainly.get():
            return fun(*args, **kwargs)
        return self._call(internals.uncompiled(fun), args, kwargs)  # remat has to see the torch calls

    @internals.left_alone_by_dynamo
    def _call(self, fun: Callable[P, R], args: Any, kwargs: Any) -> R:
        outer = current_look()
        if outer is None and internals.tracing() and not internals.differentiating():
            return fun(*args, **kwargs)  # the ops that `make_fx` and `torch.export` record can be differentiated later
        if internals.traced_by_jit():
            return fun(*args, **kwargs)
        watch = watching.get() or (watchers[-1] if watchers else None)
        boxed = (args, kwargs) if self._static is None else self._static.boxed(args, kwargs)
        with internals.DisableTorchFunction():
            leaves, spec = _tree.flatten_call(*boxed)
            if outer is not None:
                given = [outer.read(x) if isinstance(x, Tensor) else x for x in leaves]
                if any(x is not y for x, y in zip(given, leaves, strict=True)):  # in a rerun of the outer function
                    leaves = given
                    args, kwargs = _tree.unflatten_call(spec, leaves)
            call = Call(fun, self._name, leaves, spec)
            to_skip = None if outer is None else outer.call_to_skip()
            out: Any = None if to_skip is None else call.skipped(to_skip, outer)
        see = None
        if out is None:
            where = None if watch is None else call_site
            out = call.run(fun, args, kwargs, self._policy, self._options.preserve_rng_state, where)
            see = None if watch is None else watch(fun, call, out, args, kwargs)
        out = _with_derivative(call, out, outer)
        with internals.DisableTorchFunction():
            call.let_go(out)
            if outer is not None:
                outer.add_call(self._name, out, call.signature, call.remembered(outer))
        if see is not None:
            see(out)
        return out

    def __set_name__(self, owner: type, name: str) -> None:
        if self._name.rpartition(".")[0] == owner.__qualname__:  # a method, not the default of a field
            setattr(owner, name, self._function)

    @internals.left_alone_by_dynamo
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return functools.partial(self, instance) if _compile.tracing() else types.MethodType(self._function, instance)

    @functools.cached_property
    def _function(self) -> Any:
        """A plain function that calls this object, for methods: torch, `inspect` and compiled `super()` expect one."""

        def function(*args: P.args, **kwargs: P.kwargs) -> R:
            return self(*args, **kwargs)

        function.__code__ = function.__code__.replace()  # its own: the compiler limits recompilations of one code
        return functools.update_wrapper(function, self)

    def __reduce__(self) -> Any:
        return name_of_global(self) or (Remat, (self.__wrapped__, self._options))

    def __repr__(self) -> str:
        return f"remat({self.__wrapped__!r})"


def name_of_global(decorated: Any) -> str | None:
    """The name by which a decorated function is pickled, as functions are. None if its module has no such name."""
    found: Any = sys.modules.get(getattr(decorated, "__module__", None) or "")
    for part in getattr(decorated, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return decorated.__qualname__ if found is decorated else None


class _Maker(dict[str, Any]):
    """A decorator with these options and attributes. It equals another if they are the very same."""

    def __call__(self, fun: Callable[P, R]) -> Remat[P, R]:
        new: Remat[P, R] = object.__new__(Remat)
        vars(new).update(self, __wrapped__=fun)
        return new

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Maker) or self.keys() != other.keys():
            return False
        return [*map(id, self.values())] == [*map(id, other.values())]

    __hash__ = None


def _with_derivative(call: Call, out: Any, outer: Look | None) -> Any:
    """The result of a forward, with the remat'd derivative instead of its graph."""
    with internals.DisableTorchFunction():
        results = call.results_of(out)
        if not results.tensors:
            return out
        attached = call.attach(results, functools.partial(attach, Derived(call, call, call.since)))
        values = results.tensors
        if attached is not values:
            attached = [Found(v).as_found(a) for v, a in zip(values, attached, strict=True)]
            if outer is not None:
                outer.labels.replace(values, attached)
            out = results.replaced(attached)
        values.clear()
        return out


_BODY_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FUNCTIONS = (types.FunctionType, types.MethodType)


def _check(fun: Any) -> None:
    """Raise a TypeError if `fun` can't be run again."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    if isinstance(fun, Policy):
        raise TypeError(f"remat: got a policy as the function. Write @remat(policy={fun!r}).")
    if isinstance(fun, type) and issubclass(fun, torch.nn.Module):
        raise TypeError(
            f"remat: got a class of modules, {function_name(fun)}. Decorate its forward, or wrap its instances with "
            "remat.nn.remat_module."
        )
    if not callable(fun):
        got, hint = shown(fun), ""
        if isinstance(fun, property):
            got, hint = "a property", " Write @property above @remat."
        elif isinstance(fun, Tensor):
            hint = " Write remat(f)(x), not remat(f(x))."
        raise TypeError(f"remat: fun must be callable; got {got}.{hint}")
    called = fun if isinstance(fun, _FUNCTIONS) else type(fun).__call__
    if runs_later(called):
        raise TypeError(
            f"remat: {function_name(called)} is a generator or async function: its body runs after the call, where "
            "remat can't track it. Apply remat to the functions that it calls."
        )


def runs_later(function: Any) -> bool:
    """Whether the body of a function or method runs after the call: it is a generator or async function."""
    if type(function) not in _FUNCTIONS:
        return False
    code = getattr(function, "__code__", None)  # a bound method may wrap any callable
    return code is not None and bool(code.co_flags & _BODY_LATER)


_INSTEAD = {
    "concrete": "Write static_argnums=... for arguments that are not differentiated tensors.",
    "use_reentrant": "It belongs to remat.checkpoint(function, *args, use_reentrant=False).",
    "context_fn": "Write policy=..., or remat.checkpoint(function, *args, use_reentrant=False, context_fn=...).",
    "determinism_check": "It belongs to remat.checkpoint. remat always compares the rerun with the forward.",
}


def _unknown(name: str) -> str:
    parameters = inspect.signature(remat).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    close = difflib.get_close_matches(name, known, n=1)
    hint = _INSTEAD.get(name) or (f"Did you mean {close[0]}?" if close else f"It takes {', '.join(known)}.")
    return f"remat() got an unexpected keyword argument {name!r}. {hint}"


class _Decorator(Protocol):
    """The decorator that `remat` returns without a function. Decorated functions keep their type."""

    def __call__(self, fun: F, /) -> F: ...


class _Keywords(TypedDict, total=False):
    policy: PolicyLike
    static_argnums: int | Iterable[int]
    static_argnames: str | Iterable[str]
    preserve_rng_state: bool
    prevent_cse: Any


@overload
def remat(fun: F, **options: Unpack[_Keywords]) -> F: ...


@overload
def remat(fun: None = None, **options: Unpack[_Keywords]) -> _Decorator: ...


def remat(
    fun: Any = None,
    *,
    policy: PolicyLike = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    preserve_rng_state: bool = True,
    prevent_cse: Any = True,
    **others: Any,
) -> Any:
    """Run a function again on backward instead of storing its activations.

    `remat(fun)` has the values of `fun` and its derivatives of every order, under every transform of `torch.func` and
    under plain autograd. Between forward and backward it keeps the tensors that `fun` was given and those that it read
    from outside (closures, modules, globals), and none that it computed.

    The contract:

    1. `fun` runs once in the forward, and once more for each derivative that needs it. Python side effects happen
        again: prints, appends, counters, hooks. `remat.is_rerunning()` tells a rerun from the forward.
    2. A rerun finds these as they were at the call: the arguments, including lists and dicts; closed-over values,
        defaults and arguments of partials; the tensors of modules; the state of torch's generators; autocast, default
        dtype and device, the user's torch modes, and context variables other than lists, dicts and sets.
    3. `fun` may change a tensor from outside in place if that is not differentiated: the statistics of BatchNorm, a
        counter, a cache. The change happens once, in the forward. The rerun works on a copy of the earlier value.
    4. Everything else must not change between forward and backward. It is an error if a tensor was changed in place,
        or if the rerun makes other torch calls, or passes them other shapes, tensors, numbers or flags. Pass what
        varies as an argument.

    **Arguments:**

    - `fun`: a function, method, lambda, `functools.partial`, callable object or `nn.Module`. Without it, the decorator
        with these options is returned.
    - `policy`: which results of ops are kept instead of recomputed; None keeps nothing.
    - `static_argnums`: positions of arguments that are passed on as they are: a rerun gets the very same objects.
        Tensors in them count as captured.
    - `static_argnames`: the same by name.
    - `preserve_rng_state`: repeat the random draws of the forward in the rerun. False saves the cost of saving the
        states of generators; a function that does draw then gets wrong gradients.
    - `prevent_cse`: accepted for compatibility with `jax.checkpoint`. It has no effect: nothing merges the two runs.

    **Returns:** a callable with the name, documentation and signature of `fun`. For a module, a module of the same
    class, with the very same parameters, buffers, hooks and attributes.

    **Raises:** `TypeError` for generators, async functions and classes of modules, which can't run again as a whole. At
    the call, `RematError` if `fun` changes a differentiated tensor in place, or reads a tensor that remat can't find
    again. On backward, `CheckpointError` if the rerun differs from the forward.

    **Source:** `jax.checkpoint`; Chen et al., *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174.

    Examples:
        >>> import torch
        >>> from torch.func import grad, vmap
        >>> from remat import remat
        >>> @remat
        ... def block(w, x):
        ...     return torch.tanh(x @ w)
        >>> def loss(w, x):
        ...     return block(w, block(w, x)).sum()
        >>> w, xs = torch.eye(3), torch.ones(5, 3)
        >>> vmap(grad(loss), in_dims=(None, 0))(w, xs).shape
        torch.Size([5, 3, 3])
    """
    for name in others:
        raise TypeError(_unknown(name))
    options = _Options(
        policy,
        as_tuple("static_argnums", "ints", static_argnums, int),
        as_tuple("static_argnames", "names", static_argnames, str),
        preserve_rng_state,
    )
    if fun is None:
        return functools.partial(remat, **vars(options))
    if isinstance(fun, (staticmethod, classmethod)):
        return type(fun)(remat(fun.__func__, **vars(options)))
    _check(fun)
    if isinstance(fun, torch.nn.Module) and not _compile.tracing():  # dynamo can't change a class
        checked: Any = Remat(fun.forward, options)
        return wrapped_twin(fun, replace(options, policy=checked._policy))
    return Remat(fun, options)
