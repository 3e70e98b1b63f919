"""Key threading: code that draws from torch's global generators, as a pure function of a key.

NOTE [Two modes] `Threading`, a torch-function mode, sees torch's functions above all transforms: it makes each draw
from a subkey. What it does not know reaches the ops below all transforms; there `_Guard`, a dispatch mode, stops it
with an error.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from remat import _torch_internals as internals
from remat._errors import RematError
from remat.random import _stateful, _stateful_layers  # noqa: F401  # they fill the table
from remat.random._check import check_key
from remat.random._key import fold_in
from remat.random._rules import COMPOSITES, DRAWS, FRESH
from remat.random._to_internals import vmap_levels

P = ParamSpec("P")
R = TypeVar("R")


class State(NamedTuple):
    """Where the threading of keys stands: all that the draws from here on depend on.

    `remat` takes it down when a forward run begins, and begins the rerun `resumed` from it. The key is a tensor like
    others that the run reads: it may belong to a transform, and is to be replaced by the operand that stands for it.
    """

    key: Tensor
    drawn: int
    vmaps: int
    """How many of the active vmaps were begun inside of `keyed`: the draws differ along them."""


class _Guard(internals.TorchDispatchMode):
    """Stops an op that has drawn from a global generator, and undoes the draw."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        explicit = any(isinstance(arg, torch.Generator) for arg in (*args, *kwargs.values()))
        if torch.Tag.nondeterministic_seeded not in func.tags or explicit:
            return func(*args, **kwargs)
        # Whether it draws depends on its arguments, such as dropout_p=0: look if it did.
        devices = {arg.device for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)}
        devices |= {torch.device(kwargs["device"])} if kwargs.get("device") is not None else {torch.device("cpu")}
        before = {device: _random_state(device) for device in devices if device.type != "meta"}
        out = func(*args, **kwargs)
        for device, state in before.items():
            if not torch.equal(state, _random_state(device)):
                _restore_random_state(device, state)
                raise RematError(
                    f"remat.random.keyed: {func} drew from the global generator of {device}, and there is no rule that "
                    "makes it draw from a key. Draw with next_key() and a function of remat.random, or give the op a "
                    "generator=."
                )
        return out


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _restore_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class Threading(TorchFunctionMode):
    """Within it, each draw from a global generator is one from a subkey of the state's key."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.key, self.drawn, inner_vmaps = state
        self._outer_vmaps = len(vmap_levels()) - inner_vmaps

    def state(self) -> State:
        return State(self.key, self.drawn, len(vmap_levels()) - self._outer_vmaps)

    def next_key(self, who: str) -> Tensor:
        """The next subkey, with one for each element along the vmaps begun inside that ask for different draws."""
        key = fold_in(self.key, self.drawn)
        self.drawn += 1
        for level, size, randomness in vmap_levels()[self._outer_vmaps :]:
            if randomness == "error":
                raise RematError(
                    f"remat.random.keyed: {who} draws under a vmap that does not say how: write "
                    "vmap(..., randomness='different') or 'same'."
                )
            if randomness == "different":
                index = torch.arange(size, dtype=torch.int32, device=key.device)
                key = fold_in(key, internals.wrap_batched(index, 0, level))
        return key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is next_key:
            return self.next_key("next_key")
        draw = DRAWS.get(func)
        if draw is not None and kwargs.get("generator") is None:
            return draw(functools.partial(self.next_key, func.__name__), func, *args, **kwargs)
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if func in FRESH and self._outer_vmaps:
            # There may be a copy for each key: it may be filled in place with what depends on the key.
            return torch.where(self.key.view(torch.int32)[0] == 0, out, out)
        return out


def threading_state() -> State | None:
    """Where the innermost threading stands now, None outside of `keyed`."""
    for mode in reversed(internals.function_modes()):
        if isinstance(mode, Threading):
            return mode.state()
    return None


@contextlib.contextmanager
def resumed(state: State) -> Iterator[None]:
    """Within it, the draws are those that came after `state` was taken down."""
    guard = contextlib.nullcontext() if torch.compiler.is_compiling() else _Guard()
    with guard, Threading(state):
        yield


def keyed(fun: Callable[P, R]) -> Callable[Concatenate[Tensor, P], R]:
    """A function whose code draws in torch's usual, stateful way, as a pure function of a key.

    `keyed(fun)(key, *args, **kwargs)` runs `fun(*args, **kwargs)`. Each draw in it, such as that of `nn.Dropout`,
    `torch.rand`, `x.normal_()` or a `torch.distributions` sample, takes a subkey of its own: `fold_in(key, 0)`,
    `fold_in(key, 1)` and so on in the order of execution. The global generators are neither read nor advanced; a draw
    from a `generator=` is left alone. The numbers are not those that torch would have drawn.

    The result is a function like any other: under `torch.func` transforms, in `remat` and around it. `vmap` over keys
    is the loop over keys. Under a vmap inside of `fun`, its `randomness` decides as usual.

    **Arguments:**

    - `fun`: a function, or a module.

    **Returns:** a function of a key and the arguments of `fun`.

    **Raises:** when called: `TypeError` if the first argument is no single key; `RematError` if `fun` draws in a way
    for which there is no rule, naming the op.

    Examples:
        >>> import torch
        >>> from remat.random import key, keyed
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16).train()
        >>> x = torch.ones(5, 1, 8)
        >>> torch.equal(keyed(layer)(key(0), x), keyed(layer)(key(0), x))
        True
        >>> torch.equal(keyed(layer)(key(0), x), keyed(layer)(key(1), x))
        False
    """

    def of_key(key: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if check_key("keyed", key).ndim != 1:
            raise TypeError(
                "remat.random.keyed: the function takes a single key, of shape (2,): map over a batch of keys with "
                f"torch.vmap(keyed(fun)); got keys of shape {tuple(key.shape)}."
            )
        with resumed(State(key, 0, 0)):
            return fun(*args, **kwargs)

    if not torch.compiler.is_compiling():
        _describe(of_key, fun)
    return of_key


def _describe(of_key: Callable[..., Any], fun: Callable[..., Any]) -> None:
    """Name and document `of_key` as `fun`, with the signature that has the key in front."""
    functools.update_wrapper(of_key, fun, updated=())
    try:
        signature = inspect.signature(fun)
        key = inspect.Parameter("key", inspect.Parameter.POSITIONAL_ONLY, annotation=Tensor)
        of_key.__signature__ = signature.replace(parameters=[key, *signature.parameters.values()])  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # no signature to be found, or one with a key of its own
        del of_key.__wrapped__  # type: ignore[attr-defined]


_ANY = (torch.empty(()),)


def next_key() -> Tensor:
    """The next subkey of the running `keyed` function, for code that draws with keys itself.

    **Returns:** a key that no other draw in the function uses.

    **Raises:** `RematError` outside of `keyed`.

    Examples:
        >>> from remat.random import key, keyed, next_key, normal
        >>> keyed(lambda: normal(next_key(), (2,)))(key(0))
        tensor([ 1.0040, -0.9063])
    """
    if has_torch_function(_ANY):  # a mode is active: offer it the call, as torch's own functions do
        return handle_torch_function(next_key, _ANY)
    raise RematError(
        "remat.random.next_key: there is no key to take the next one of, because no keyed function is running. "
        "Call it in a function f that runs as keyed(f)(key)."
    )
