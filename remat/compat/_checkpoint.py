"""`checkpoint`, its form as a decorator, and `checkpoint_sequential`."""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from remat import _torch_internals as internals
from remat._errors import shown, warn
from remat._nested_mode import current_look
from remat._remat import plainly, remat, runs_later
from remat.compat import _debug, _settings
from remat.compat._call import NO_CONTEXTS, Contexts
from remat.compat._look import CheckpointLook
from remat.compat._reentrant import CheckpointFunction
from remat.compat._region import Options, Region
from remat.compat._selective import Selective, call_compiled, for_one_call
from remat.policies import Policy
from remat.random._keyed import running

_DETERMINISM_CHECKS = ["default", "none"]


def checkpoint(
    function: Any = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a function, and run it again on backward instead of storing its activations.

    It is `torch.utils.checkpoint.checkpoint`, with the same arguments and the same two variants:

    - `use_reentrant=False`, the one to use: the graph is recorded, so it works with nested structures, closures and
        keyword arguments, under `torch.autograd.grad` and with backward passes inside the function.
    - `use_reentrant=True`: the forward runs in `torch.no_grad`. There are gradients only if one of the positional
        arguments requires grad; the function takes no keyword arguments.

    The function runs again with its side effects; `remat.is_rerunning()` is true then. Arguments, closure, random draws
    and autocast are as at the call. Changes in place to tensors from outside happen once. Under the transforms of
    `torch.func`, it is `remat(function)(*args, **kwargs)`.

    **Arguments:**

    - `function`: the function. Without it, the decorator with these options is returned:
        `checkpoint(use_reentrant=False)(fn)`.
    - `args`, `kwargs`: its arguments.
    - `use_reentrant`: which variant. Pass it: the default is True, with a warning.
    - `preserve_rng_state`: repeat in the rerun what the forward drew from torch's generators.
    - `context_fn`: returns two context managers, for the forward and for the rerun, as
        `create_selective_checkpoint_contexts` does. Not for the reentrant variant.
    - `determinism_check`: `"default"` compares the shapes, dtypes and devices of the tensors that both runs save,
        `"none"` only their number. Not for the reentrant variant.
    - `debug`: on a mismatch, name the first op that differs, with both call sites. Not for the reentrant variant.
    - `early_stop`: end the rerun as soon as it has recomputed all that the backward needs.
    - `respect_saved_tensors_hooks`: whether the values that a policy keeps go through the user's
        `saved_tensors_hooks` around the call, such as `save_on_cpu`. None: they do not, with a warning, because later
        versions of torch change that. Not for the reentrant variant.

    **Returns:** the function's result, or the decorator.

    **Raises:** `TypeError` if `function` can't be called, or is a generator or async function, whose body runs later;
    `ValueError` for options that the variant does not have; `RematError` if the function calls `torch.func.grad` or
    the like, with `use_reentrant=False`. On backward, `CheckpointError` if the rerun differs from the forward, and
    `RuntimeError` if a tensor that the function was given or read has been changed in place.

    **Source:** Chen et al., *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174.

    Examples:
        >>> import torch
        >>> from remat import checkpoint
        >>> layer = torch.nn.Linear(3, 3)
        >>> x = torch.ones(2, 3)
        >>> y = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False)
        >>> y.sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([3, 3])
    """
    if use_reentrant is None:
        use_reentrant = _default_use_reentrant("checkpoint")
    for what, flag in (("use_reentrant", use_reentrant), ("preserve_rng_state", preserve_rng_state)):
        if flag not in (0, 1):  # as NumPy's bools are
            raise TypeError(f"checkpoint: {what} must be a bool; got {shown(flag)}.")
    if use_reentrant:
        if context_fn is not noop_context_fn or debug is not False or respect_saved_tensors_hooks is not None:
            raise ValueError(
                "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported when "
                "use_reentrant=False."
            )
    elif determinism_check not in _DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check should be one of {_DETERMINISM_CHECKS}, but got {determinism_check}")
    options = Options(
        use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop, respect_saved_tensors_hooks
    )
    if function is not None or args:
        return _call(options, function, args, kwargs)
    _check_no_keywords(kwargs)
    return functools.partial(_decorated, options)


def _decorated(options: Options, function: Callable[..., Any]) -> Callable[..., Any]:
    _check_function(function)

    @functools.wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return _call(options, function, args, kwargs)

    return checkpointed


def _call(options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if options.use_reentrant:
        _check_no_keywords(kwargs)
    if torch.compiler.is_dynamo_compiling():
        return call_compiled(options.context_fn, options.preserve_rng_state, function, args, kwargs)
    _check_function(function)
    return _call_eagerly(options, function, args, kwargs)


@internals.left_alone_by_dynamo
def _call_eagerly(options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    contexts, selective = NO_CONTEXTS, None
    if options.context_fn is not noop_context_fn:
        contexts = _contexts_of(options.context_fn)
        selective = for_one_call(contexts, options.respect_saved_tensors_hooks)
    if plainly.get() or internals.traced_by_jit() or not (options.use_reentrant or torch.is_grad_enabled()):
        return function(*args, **kwargs)
    if _needs_transforms():
        return _functional(function, contexts, selective, options.preserve_rng_state)(*args, **kwargs)
    if options.use_reentrant:
        return CheckpointFunction.apply(function, options.preserve_rng_state, *args)
    stop, traced = _settings.early_stop.get(), _settings.debug_enabled.get()
    if stop is not None:
        options = options._replace(early_stop=stop)
    with internals.DisableTorchFunction():
        region = Region(function, args, kwargs, options, contexts, selective)
    if options.debug if traced is None else traced:
        _debug.trace(region)
    return region.run(function, args, kwargs)


# Transforms.


def _needs_transforms() -> bool:
    if internals.transforms_active() or internals.forward_ad_active() or internals.saved_tensors_hooks_refused():
        return True
    if not internals.function_modes_active():
        return False
    look = current_look()
    if look is not None and not isinstance(look, CheckpointLook):
        return True  # in a function under remat: its reruns may be at another level of transforms
    return running() is not None  # it draws from a key


def _functional(function: Any, contexts: Contexts, selective: Selective | None, preserve_rng_state: bool) -> Any:
    """`function` under `remat`, with the same contexts."""
    if selective is not None or contexts is NO_CONTEXTS:
        policy = None if selective is None else selective.policy
        return remat(function, policy=policy, preserve_rng_state=preserve_rng_state)
    # Not a list, which would begin again in a rerun.
    in_turn = itertools.chain(contexts[:1], itertools.repeat(contexts[1]))

    def under_context(*args: Any, **kwargs: Any) -> Any:
        with next(in_turn):
            return function(*args, **kwargs)

    return remat(under_context, preserve_rng_state=preserve_rng_state)


# Checks of the arguments.


def _default_use_reentrant(who: str) -> bool:
    """The default, with a warning."""
    warn(
        f"remat.{who}: the use_reentrant parameter should be passed explicitly. use_reentrant=False is recommended; "
        "use_reentrant=True keeps the behaviour so far. Later versions of torch.utils.checkpoint raise an error here."
    )
    return True


def _check_no_keywords(kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))


def _check_function(function: Any) -> None:
    if not callable(function):
        hint = " Write checkpoint(layer, x), not checkpoint(layer(x))." if isinstance(function, torch.Tensor) else ""
        raise TypeError(f"checkpoint: function must be callable; got {shown(function)}.{hint}")
    if runs_later(function.func if type(function) is functools.partial else function):
        remat(function)  # raises


def _contexts_of(context_fn: Any) -> Contexts:
    """The two contexts that `context_fn` returns."""
    contexts = context_fn() if callable(context_fn) and not isinstance(context_fn, Policy) else context_fn
    if not isinstance(contexts, (tuple, list)) or len(contexts) != 2:
        raise TypeError(
            f"checkpoint: context_fn must be a function that returns two context managers; got {shown(contexts)}. For "
            "a policy, write context_fn=functools.partial(create_selective_checkpoint_contexts, policy)."
        )
    return contexts[0], contexts[1]


# Sequences.


def checkpoint_sequential(
    functions: torch.nn.Sequential | Iterable[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Run functions one after the other, in segments, each but the last under `checkpoint`.

    **Arguments:**

    - `functions`: an `nn.Sequential`, or an iterable of functions; each gets the result of the one before.
    - `segments`: the number of segments, from 1 to the number of functions.
    - `input`: the argument of the first function.
    - `use_reentrant`, `preserve_rng_state`: as for `checkpoint`.

    **Returns:** the result of the last function.

    **Raises:** `TypeError` if one of them can't be called, or if there are none; `ValueError` if `segments` is not an
    int or out of range, and for other keywords.

    Examples:
        >>> import torch
        >>> from remat import checkpoint_sequential
        >>> layers = [torch.nn.Linear(3, 3) for _ in range(4)]
        >>> x = torch.ones(2, 3)
        >>> y = checkpoint_sequential(layers, 2, x, use_reentrant=False)
        >>> y.shape
        torch.Size([2, 3])
    """
    if use_reentrant is None:
        use_reentrant = _default_use_reentrant("checkpoint_sequential")
    _check_no_keywords(kwargs)
    given = functions.children() if isinstance(functions, torch.nn.Sequential) else functions
    steps = tuple(given) if isinstance(given, Iterable) else ()
    if not steps or not all(map(callable, steps)):
        raise TypeError(
            "checkpoint_sequential: functions must be a Sequential or an iterable of callables, one at least; got "
            f"{shown(functions)}."
        )
    if not isinstance(segments, numbers.Integral) or not 1 <= segments <= len(steps):
        raise ValueError(
            f"checkpoint_sequential: segments must be from 1 to {len(steps)}, the number of functions; "
            f"got {shown(segments)}."
        )
    size = len(steps) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        segment = functools.partial(_one_after_another, steps[start : start + size])
        input = checkpoint(segment, input, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return _one_after_another(steps[last:], input)


def _one_after_another(steps: Iterable[Callable[[Any], Any]], input: Any) -> Any:
    for step in steps:
        input = step(input)
    return input
