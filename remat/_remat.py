"""The decorator."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import ParamSpec

from remat import _compile, _tree
from remat import _torch_internals as internals
from remat._code import runs_later
from remat._derived import Derived
from remat._errors import shown, warn
from remat._frozen import ATOMS
from remat._nesting import is_inside
from remat._primitive import attach
from remat._pure import runs_again
from remat._replay import Call
from remat._run import Run
from remat._spaces import attributes_of
from remat._static import StaticArguments, as_tuple
from remat._unwatched import unwatched
from remat._watch import active_watches
from remat.policies import Policy, as_policy

P = ParamSpec("P")
R = TypeVar("R")

plainly: ContextVar[bool] = ContextVar("remat_plainly", default=False)
"""Whether remat'd functions run as they are: to see what they save without remat."""

Watch = Callable[[Any, Call, Run, Any, Any, Any], Callable[[Any], None]]
"""What sees function, call, run, result and arguments of a call, and then the final result."""
watching: ContextVar[Watch | None] = ContextVar("remat_watching", default=None)
"""Who sees the calls of this context."""
watchers: list[Watch] = []
"""Who sees those of all contexts that have nobody of their own."""


@dataclass(frozen=True)
class _Options:
    policy: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    preserve_rng_state: bool


class Remat(Generic[P, R]):
    """A function that runs again on backward: what `remat` returns."""

    __wrapped__: Callable[P, R]

    def __init__(self, fun: Callable[P, R], options: _Options) -> None:
        functools.update_wrapper(self, fun, updated=("__dict__",) if isinstance(fun, types.FunctionType) else ())
        self._options = options
        self._name = _name(fun)
        self._policy = None if options.policy is None or _compile.tracing() else as_policy(options.policy)
        self._static = StaticArguments(fun, self._name, options.static_argnums, options.static_argnames)
        self._has_static = bool(options.static_argnums or options.static_argnames)

    def __remat_maker__(self) -> Callable[[Callable[P, R]], Remat[P, R]]:
        """The same transform, to be applied to another function."""
        return functools.partial(Remat, options=self._options)

    @property
    def __remat_is_plain__(self) -> bool:
        """Whether what it does is known from the function alone."""
        return self._policy is None and not self._has_static

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        fun = self.__wrapped__
        if _compile.tracing():
            return _compile.call(remat, self._options.policy, self._options.preserve_rng_state, fun, args, kwargs)
        if not torch.is_grad_enabled() or plainly.get():
            return fun(*args, **kwargs)
        fun = internals.uncompiled(fun)  # remat goes by the ops
        watch = watching.get() or (watchers[-1] if watchers else None)
        if self._policy is None and (watch is None or is_inside()):
            unwatched_call = unwatched(fun, self._name, args, kwargs, sees_ops=False, as_given=self._has_static)
            if unwatched_call is not None:
                return unwatched_call.run(fun, args, kwargs, self._options.preserve_rng_state)
        leaves, spec = _tree.flatten(self._static.boxed(args, kwargs))
        call = Call(fun, self._name, leaves, spec, self._policy)
        call.watched = watch is not None
        out, run = call.record(args, kwargs, leaves, self._options.preserve_rng_state)
        see = None if watch is None else watch(fun, call, run, out, args, kwargs)
        out = _with_derivative(out, call, leaves, run)
        if see is not None:
            see(out)
        return out

    def __set_name__(self, owner: type, name: str) -> None:
        if self._name.rpartition(".")[0] == owner.__qualname__:  # it is a method, and not the default of a field
            setattr(owner, name, self._function)

    @internals.left_alone_by_dynamo
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return functools.partial(self, instance) if _compile.tracing() else types.MethodType(self._function, instance)

    @functools.cached_property
    def _function(self) -> Any:
        """What a method is made of: torch, `inspect` and `super()` in compiled code look for a plain function."""

        def function(*args: P.args, **kwargs: P.kwargs) -> R:
            return self(*args, **kwargs)

        if self.__remat_is_plain__:
            runs_again.add(function)
        function.__code__ = function.__code__.replace()  # the compiler counts what it has compiled of each code
        return functools.update_wrapper(function, self)

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("__wrapped__")
        if isinstance(module, torch.nn.Module) and hasattr(module, name):
            raise AttributeError(
                f"remat: remat({type(module).__name__}(...)) is a function, and has no {name!r}: ask the module. "
                "To have a module that runs again on backward, wrap it with remat.nn.remat_module.",
                name=name,
                obj=self,
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __reduce__(self) -> Any:
        # A decorated function is found by its name, as functions are; anything else is wrapped again.
        found: Any = sys.modules.get(getattr(self, "__module__", None) or "")
        for part in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, part, None)
        return self.__qualname__ if found is self else (Remat, (self.__wrapped__, self._options))

    def __repr__(self) -> str:
        return f"remat({self.__wrapped__!r})"


def _name(fun: Any) -> str:
    if isinstance(fun, functools.partial):
        return f"partial({_name(fun.func)})"
    return getattr(fun, "__qualname__", None) or type(fun).__qualname__


@internals.left_alone_by_dynamo
def _with_derivative(out: Any, call: Call, leaves: list[Any], run: Run) -> Any:
    """The result of a run, with the remat'd derivative in the place of the graph it came with."""
    results = _tree.Picked(out, run.computed)
    values = results.tensors
    for leaf in results.leaves:
        if type(leaf) not in ATOMS and not isinstance(leaf, Tensor):
            _check_result(leaf, call, run)
    if not values:
        return out
    with internals.DisableTorchFunction():
        differentiated = internals.forward_ad_active() or any(map(internals.requires_grad_at_any_level, values))
    if not differentiated or (internals.tracing() and not internals.differentiating()):
        return out  # what `make_fx` and `torch.export` write down can be differentiated later
    call.returned = results.positions
    with internals.DisableTorchFunction():
        operands = call.operands(leaves, run, values, [r for r in results.leaves if isinstance(r, Tensor)])
    outer = active_watches()
    for other in reversed(outer):
        operands = [other.resolve(t, read=i not in call.handed_on) for i, t in enumerate(operands)]
        values = [other.resolve(t, read=False) for t in values]
    with internals.DisableTorchFunction():
        attached = attach(Derived(call, call), values, [internals.unwrap_dead(t) for t in operands])
        if attached is values:
            return out
        attached = [_of_kind(type(v), a) for v, a in zip(values, attached, strict=True)]
    for value, raw in zip(attached, values, strict=True):
        for other in outer:
            other.adopt(value, same_as=raw)
    return results.replaced(attached)


_NO_TREE = (
    "remat: {} returns results in an object of class {}, which is no tree: their graph is kept as it is, and no memory "
    "is saved. Return a tuple, a dict or a NamedTuple, or make the class known: torch.export.register_dataclass, "
    "or optree.register_pytree_node with namespace='torch'."
)


def _check_result(result: Any, call: Call, run: Run) -> None:
    """Warn where an object that is no tree holds what the function has computed."""
    with internals.DisableTorchFunction():
        held = [t for t in _tree.flatten(attributes_of(result))[0] if isinstance(t, Tensor) and run.is_made(t)]
        if any(map(internals.requires_grad_at_any_level, held)) and not run.in_rerun:
            warn(_NO_TREE.format(call.name, type(result).__name__))


def _of_kind(kind: type[Tensor], tensor: Tensor) -> Tensor:
    """A tensor of the user's own class, which the nodes of autograd know nothing of."""
    if type(tensor) is kind or kind is torch.nn.Parameter or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor.as_subclass(kind)


_FUNCTIONS = (types.FunctionType, types.MethodType)


def _check(fun: Any) -> None:
    """Raise a TypeError for what can't be run again."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    called = fun
    if not isinstance(fun, _FUNCTIONS):
        if isinstance(fun, Policy):
            raise TypeError(f"remat: got a policy as the function. Write @remat(policy={fun!r}).")
        if isinstance(fun, type) and issubclass(fun, torch.nn.Module):
            raise TypeError(
                f"remat: got a class of modules, {_name(fun)}. Decorate its forward, or wrap its instances with "
                "remat.nn.remat_module."
            )
        if fun is None:
            return
        if isinstance(fun, property):
            raise TypeError("remat: fun must be callable; got a property. Write @property above @remat.")
        if isinstance(fun, Tensor):
            raise TypeError(f"remat: fun must be callable; got {shown(fun)}. Write remat(f)(x), not remat(f(x)).")
        if not callable(fun):
            raise TypeError(f"remat: fun must be callable; got {shown(fun)}.")
        called = type(fun).__call__
    if runs_later(called):
        raise TypeError(
            f"remat: {_name(called)} is a generator or async function: its body runs after the call, out of remat's "
            "sight. Put under remat what computes in it."
        )


@overload
def remat(
    fun: Callable[P, R],
    *,
    policy: Any = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    preserve_rng_state: bool = True,
) -> Remat[P, R]: ...


@overload
def remat(
    fun: None = None,
    *,
    policy: Any = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    preserve_rng_state: bool = True,
) -> Callable[[Callable[P, R]], Remat[P, R]]: ...


def remat(
    fun: Any = None,
    *,
    policy: Any = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    preserve_rng_state: bool = True,
) -> Any:
    """Run a function again on backward instead of storing its activations.

    `remat(fun)` computes what `fun` computes, and so do its derivatives of every order, under every transform of
    `torch.func` and under plain autograd. Between forward and backward it keeps the tensors that `fun` was given and
    those it read from outside (closures, modules, globals), and nothing that it computed. The first derivative costs
    one more run of `fun`.

    `fun` must do the same each time it is called with the same tensors; draws from torch's generators are repeated.
    What it closes over counts as it was when it was called.

    **Arguments:**

    - `fun`: a function, method, lambda, `functools.partial`, callable object or `nn.Module`. Without it, the decorator
        with these options is returned.
    - `policy`: which results of ops are kept instead of computed again; None keeps nothing.
    - `static_argnums`: positions of arguments that are kept whole: their tensors are not looked for as leaves.
    - `static_argnames`: the same by name.
    - `preserve_rng_state`: repeat the random draws of the forward in the rerun. False saves the cost of
        looking after the generators, for functions that draw nothing: what draws gets the derivative of other draws.

    **Returns:** a callable with the name, documentation and signature of `fun`.

    **Raises:** `TypeError` for what can't run again as a whole: generators, async functions and classes of modules; at
    the call, `RematError` where `fun` changes an input in place or takes a gradient out of
    sight; on backward, `CheckpointError` where the rerun differs from the forward run.

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
    if isinstance(fun, (staticmethod, classmethod)):
        kind, fun = type(fun), fun.__func__
    else:
        kind = None
    _check(fun)
    options = _Options(
        policy,
        as_tuple("static_argnums", "ints", static_argnums, int),
        as_tuple("static_argnames", "names", static_argnames, str),
        preserve_rng_state,
    )
    if fun is None:
        return functools.partial(remat, **vars(options))
    wrapped: Any = Remat(fun, options)
    return kind(wrapped) if kind else wrapped


runs_again.add(remat)
