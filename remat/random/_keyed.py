"""Key threading: code that draws from torch's global generators, as a pure function of a key.

NOTE [two modes]: `Threading`, a torch-function mode, sees torch's functions above all transforms, and makes each draw
from a subkey. A random function that it does not know reaches the ops below all transforms. There `_Guard`, a dispatch
mode, raises an error.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from remat import _torch_internals as internals
from remat._dispatch_mode import DispatchMode
from remat._errors import RematError
from remat.random import _stateful, _stateful_layers  # noqa: F401  # they fill the table
from remat.random._check import check_key, what
from remat.random._generators import global_state, is_global, same_state, set_global_state
from remat.random._key import fold_in
from remat.random._rules import COMPOSITES, DRAWS, FRESH

P = ParamSpec("P")
R = TypeVar("R")


class Position(NamedTuple):
    """The progress of a threading. Position and key determine all later draws.

    `remat` records the position at the start of a forward, and resumes the rerun from it. The key is a tensor that the
    run reads, like any other: it may belong to a transform, and the rerun replaces it by its operand.
    """

    drawn: int
    vmaps: int
    """The number of active vmaps that began inside `keyed`: draws may differ along them."""


class Threading(TorchFunctionMode):
    """A mode under which each draw from a global generator is a draw from a subkey."""

    def __init__(self, key: Tensor, position: Position) -> None:
        super().__init__()
        self.key = key
        self.suspended = False
        self._drawn = position.drawn
        self._outer_vmaps = len(internals.vmap_levels()) - position.vmaps
        self._outer_checkpoints = _torch_checkpoints()

    def position(self) -> Position:
        return Position(self._drawn, len(internals.vmap_levels()) - self._outer_vmaps)

    def next_key(self, who: str) -> Tensor:
        """The next subkey. It differs along the vmaps inside `keyed` with `randomness="different"`."""
        if _torch_checkpoints() > self._outer_checkpoints:
            raise RematError(
                f"remat.random.keyed: {who} draws in a function under torch.utils.checkpoint, whose rerun has no "
                "keys and would draw other numbers. Use remat.remat instead."
            )
        key = fold_in(self.key, self._drawn)
        self._drawn += 1
        for level, size, randomness in internals.vmap_levels()[self._outer_vmaps :]:
            if randomness == "error":
                raise RematError(
                    f"remat.random.keyed: {who} draws under a vmap that does not allow it: write "
                    "vmap(..., randomness='different') or 'same'."
                )
            if randomness == "different":
                index = torch.arange(size, dtype=torch.int32, device=key.device)
                key = fold_in(key, internals.wrap_batched(index, 0, level))
        return key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended:
            return func(*args, **kwargs)
        if func is next_key:
            return self.next_key("next_key")
        draw = DRAWS.get(func)
        if draw is not None and not _from_explicit_generator(args, kwargs):
            return draw(functools.partial(self.next_key, func.__name__), func, *args, **kwargs)
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if func in FRESH and self._outer_vmaps:
            # Make a copy for each key, because code may fill the tensor in place with values that depend on the key.
            return torch.where(self.key.to(torch.int32)[0] == 0, out, out)
        return out


def _torch_checkpoints() -> int:
    """The number of frames of torch.utils.checkpoint on the stack."""
    if torch.compiler.is_compiling():
        return 0
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _from_explicit_generator(args: Any, kwargs: Any) -> bool:
    given = (
        arg for arg in (*args, *kwargs.values()) if not isinstance(arg, torch.Tensor)
    )  # dynamo can't inspect a tensor
    return any(isinstance(arg, torch.Generator) and not is_global(arg) for arg in given)


class _Guard(DispatchMode):
    """Raises an error if an op has drawn from a global generator, and undoes the draw."""

    supports_higher_order_operators = True

    def __init__(self, threading: Threading) -> None:
        super().__init__()
        self._threading = threading

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._threading.suspended or not _may_draw(func) or _from_explicit_generator(args, kwargs):
            return func(*args, **kwargs)
        # Its arguments decide whether it draws (dropout_p=0), so run it and look.
        devices = {arg.device for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)}
        devices |= {torch.device(kwargs["device"])} if kwargs.get("device") is not None else {torch.device("cpu")}
        before = {device: global_state(device) for device in devices if device.type != "meta"}
        out = func(*args, **kwargs)
        with internals.DisableTorchFunction():
            moved = [device for device, state in before.items() if not same_state(state, global_state(device))]
        for device in moved:
            set_global_state(device, before[device])
            raise RematError(
                f"remat.random.keyed: {func} drew from the global generator of {device}, and there is no rule that "
                "makes it draw from a key. Draw with next_key() and a function of remat.random, or pass a "
                "generator= to the op."
            )
        return out


def _may_draw(func: Any) -> bool:
    """Whether an op is random, or has ops inside that no mode sees."""
    if getattr(func, "namespace", None) in ("aten", "prims", "remat"):
        return torch.Tag.nondeterministic_seeded in func.tags
    return True


def _active() -> list[Threading]:
    """The active threadings of keys, innermost last."""
    if not internals.function_modes_active():
        return []
    return [mode for mode in internals.function_modes() if isinstance(mode, Threading) and not mode.suspended]


def running() -> Threading | None:
    """The innermost active threading, or None outside `keyed`."""
    active = _active()
    return active[-1] if active else None  # dynamo traces this, and knows no `next` of an empty list (2.12)


@contextlib.contextmanager
def resumed(key: Tensor, position: Position) -> Iterator[None]:
    """Draw from the subkeys of `key` after a position, in the block."""
    threading = Threading(key, position)
    guard = contextlib.nullcontext() if torch.compiler.is_compiling() else _Guard(threading)
    with guard, threading:
        yield


def suspended() -> contextlib.AbstractContextManager[None]:
    """Draw as outside `keyed`, in the block."""
    active = _active()
    return _suspended(active) if active else contextlib.nullcontext()


@contextlib.contextmanager
def _suspended(active: list[Threading]) -> Iterator[None]:
    for threading in active:
        threading.suspended = True
    try:
        yield
    finally:
        for threading in active:
            threading.suspended = False


def keyed(fun: Callable[P, R]) -> Callable[Concatenate[Tensor, P], R]:
    """Make a function that draws from torch's global generators a pure function of a key.

    `keyed(fun)(key, *args, **kwargs)` runs `fun(*args, **kwargs)`. Each draw in it, by `nn.Dropout`, `torch.rand`,
    `x.normal_()` or `torch.distributions` for example, takes its own subkey: `fold_in(key, 0)`, `fold_in(key, 1)` and
    so on, in the order of execution. The global generators are neither read nor advanced. A draw with an explicit
    `generator=` is not changed. The numbers are not those that torch would have drawn.

    The result works under `torch.func` transforms, under `remat` and around remat'd functions. `vmap` over keys equals
    the loop over keys. For a `vmap` inside `fun`, `randomness=` decides as usual.

    **Arguments:**

    - `fun`: a function, or a module.

    **Returns:** a function of a key and the arguments of `fun`.

    **Raises:** `TypeError` if `fun` can't be called. At the call, `TypeError` if the first argument is not a single
    key; `RematError` if `fun` draws by an op for which there is no rule. The message names the op.

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
    if not callable(fun):
        raise TypeError(f"remat.random.keyed: fun must be callable, as in keyed(fun)(key, x); got {what(fun)}.")

    def of_key(key: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if check_key("keyed", key).ndim != 1:
            raise TypeError(
                "remat.random.keyed: the function takes a single key, of shape (2,): map over a batch of keys with "
                f"torch.vmap(keyed(fun)); got keys of shape {tuple(key.shape)}."
            )
        with resumed(key, Position(0, 0)):
            return fun(*args, **kwargs)

    if not torch.compiler.is_compiling():
        _describe(of_key, fun)
    return of_key


def _describe(of_key: Callable[..., Any], fun: Callable[..., Any]) -> None:
    """Give `of_key` the name and documentation of `fun`, and its signature with the key in front."""
    functools.update_wrapper(of_key, fun, updated=())
    try:
        signature = inspect.signature(fun)
        key = inspect.Parameter("key", inspect.Parameter.POSITIONAL_ONLY, annotation=Tensor)
        of_key.__signature__ = signature.replace(parameters=[key, *signature.parameters.values()])  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # no signature, or one with a parameter `key`
        del of_key.__wrapped__  # type: ignore[attr-defined]


_ANY = (torch.empty(()),)


def next_key() -> Tensor:
    """Return the next subkey of the running `keyed` function, for code that draws with keys itself.

    **Returns:** a key that no other draw in the function uses.

    **Raises:** `RematError` outside `keyed`.

    Examples:
        >>> from remat.random import key, keyed, next_key, normal
        >>> keyed(lambda: normal(next_key(), (2,)))(key(0))
        tensor([ 1.0040, -0.9063])
    """
    keys = running() if torch.compiler.is_dynamo_compiling() else None  # dynamo offers a call of ours to no mode
    if keys is not None:
        return keys.next_key("next_key")
    if has_torch_function(_ANY):  # offer the call to the active modes, as torch's own functions do
        return handle_torch_function(next_key, _ANY)
    raise RematError(
        "remat.random.next_key: there is no next key, because no keyed function is running. Call it in a function f "
        "that runs as keyed(f)(key)."
    )
