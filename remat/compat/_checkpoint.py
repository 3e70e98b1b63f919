"""`checkpoint` and `checkpoint_sequential`."""

from __future__ import annotations

import functools
import itertools
import numbers
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from remat import _torch_internals as internals
from remat._errors import shown, warn
from remat._frozen import cell_contents, parts
from remat._pure import runs_again
from remat._remat import plainly, remat
from remat._unwatched import unwatched
from remat.compat import _debug, _settings
from remat.compat._call import NO_CONTEXTS, Contexts, UsesTransforms
from remat.compat._check import check_body, check_call, check_flag, check_function, check_steps, hint
from remat.compat._devices import noop_context_fn, warn_without_grad
from remat.compat._engine import Options, Region
from remat.compat._reentrant import CheckpointFunction
from remat.compat._selective import Selective, call_compiled, for_one_region
from remat.random._keyed import running

_DETERMINISM_CHECKS = ("default", "none")

# Calls that were seen to use `torch.func` go to the functional engine straight away. What is called, by identity, and
# references to see that this is still there.
_transforming: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}


def checkpoint(
    function: Any = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run a function, and run it again on backward instead of storing its activations.

    It is `torch.utils.checkpoint.checkpoint`, with the same arguments and the same two variants:

    - `use_reentrant=False`, the one to use: the graph is recorded, so it works with nested structures, closures and
        keyword arguments, under `torch.autograd.grad` and with backward passes inside of the function.
    - `use_reentrant=True`: the forward runs in `torch.no_grad`. There are gradients only if one of the positional
        arguments requires grad; the function has no keyword arguments.

    Under the transforms of `torch.func`, and for a function that uses them, it is `remat(function)(*args, **kwargs)`.

    **Arguments:**

    - `function`: what to run. Without it, the decorator with these options is returned:
        `checkpoint(use_reentrant=False)(fn)`.
    - `args`, `kwargs`: what to call it with.
    - `use_reentrant`: which variant; say it, the default is True with a warning.
    - `preserve_rng_state`: repeat the random draws of the forward in the rerun, those of torch's global and explicit
        generators, of Python's `random` and of NumPy's global generator.
    - `context_fn`: returns two context managers, for the forward and for the rerun, as
        `create_selective_checkpoint_contexts` does. Not for the reentrant variant.
    - `determinism_check`: `"default"` compares shape, dtype and device of what both runs save, `"none"` only how many
        there are. Not for the reentrant variant.
    - `debug`: on a mismatch, name the first op that differs, with both call sites. Not for the reentrant variant.
    - `early_stop`: end the rerun as soon as all that the backward needs is there.

    **Returns:** what the function returned, or the decorator.

    **Raises:** `TypeError` for what is no function, and for generators and async functions, whose body runs later;
    `ValueError` for options that the variant does not have; on backward, `CheckpointError` where the rerun differs
    from the forward, and `RuntimeError` where a tensor that the function was given, or read, was changed in place in
    between.

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
        _warn_use_reentrant("checkpoint")
        use_reentrant = True
    elif use_reentrant is not False and use_reentrant is not True:
        check_flag("use_reentrant", use_reentrant)
    if preserve_rng_state is not True and preserve_rng_state is not False:
        check_flag("preserve_rng_state", preserve_rng_state)
    if function is None and not args:
        if kwargs:
            got = ", ".join(kwargs) + hint(kwargs)
            raise TypeError(f"checkpoint: a decorator has no arguments for the function; got {got}.")
        options = {
            "use_reentrant": use_reentrant,
            "preserve_rng_state": preserve_rng_state,
            "context_fn": context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
        }
        return _decorator(options)
    if torch.compiler.is_dynamo_compiling():
        return call_compiled(function, args, kwargs, context_fn, preserve_rng_state)
    check_body(function)
    try:
        if use_reentrant:
            if kwargs:
                raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs) + hint(kwargs))
            if context_fn is not noop_context_fn or debug is not False:
                raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
            return _reentrant(function, args, preserve_rng_state)
        if determinism_check not in _DETERMINISM_CHECKS:
            known = list(_DETERMINISM_CHECKS)
            raise ValueError(f"determinism_check should be one of {known}, but got {determinism_check}")
        contexts = NO_CONTEXTS if context_fn is noop_context_fn else for_one_region(context_fn, preserve_rng_state)
        stop = _settings.early_stop.get()
        options_ = Options(preserve_rng_state, determinism_check != "none", early_stop if stop is None else stop)
        return _non_reentrant(function, args, kwargs, contexts, options_, debug)
    except TypeError as error:
        check_call(function, args, kwargs, error)
        raise


def _reentrant(function: Callable[..., Any], args: tuple[Any, ...], preserve_rng_state: bool) -> Any:
    if plainly.get():
        return function(*args)
    if not _needs_transforms(function, args):
        try:
            return CheckpointFunction.run(function, preserve_rng_state, args)
        except UsesTransforms:
            _remember(function, args)
    return _reentrant_under_transforms(function, args, preserve_rng_state)


def _non_reentrant(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: Contexts,
    options: Options,
    debug: bool,
) -> Any:
    if not torch.is_grad_enabled() or plainly.get():
        return function(*args, **kwargs)
    if _needs_transforms(function, (args, kwargs)):
        return _functional(function, contexts, options.preserve_rng_state)(*args, **kwargs)
    traced = _settings.debug_enabled.get()
    traced = debug if traced is None else traced
    selects = isinstance(contexts[0], Selective)
    if (contexts is NO_CONTEXTS or selects) and not traced:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        call = unwatched(function, name, args, kwargs, sees_ops=selects)
        if call is not None:
            return call.record(
                function,
                args,
                kwargs,
                early_stop=options.early_stop,
                preserve_rng_state=options.preserve_rng_state,
                determinism_check=options.determinism_check,
                contexts=contexts,
            )
    region = Region(function, args, kwargs, options, contexts)
    if traced:
        _debug.trace(region)
    try:
        return region.run(function, args, kwargs)
    except UsesTransforms:
        _remember(function, (args, kwargs))
        return _functional(function, contexts, options.preserve_rng_state)(*args, **kwargs)


def _decorator(options: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        check_function(function)
        check_body(function)

        @functools.wraps(function)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(function, *args, **options, **kwargs)

        return checkpointed

    return decorate


def _warn_use_reentrant(who: str) -> None:
    warn(
        f"remat.{who}: the use_reentrant parameter should be passed explicitly. use_reentrant=False is recommended; "
        "use_reentrant=True keeps what happens now, without it. torch.utils.checkpoint raises an exception here in its "
        "later versions."
    )


# Transforms.


def _called(function: Any, arguments: Any) -> dict[int, Any]:
    """What a call may call, by identity. Of functions the code, for lambdas are made anew for each call."""
    found: dict[int, Any] = {}
    seen = set()
    todo = [function, arguments]
    for obj in todo:
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        if isinstance(obj, types.FunctionType):
            found[id(obj.__code__)] = obj.__code__
            todo += (*parts(obj), *(content for _, content in cell_contents([obj]).values()))
        elif isinstance(obj, torch.nn.Module):
            found[id(obj)] = obj
        elif isinstance(obj, (list, tuple)):
            todo += obj
        elif isinstance(obj, dict):
            todo += obj.values()
        elif inside := parts(obj):
            todo += inside
        elif not isinstance(obj, torch.Tensor) and hasattr(obj, "__weakref__"):
            found[id(obj)] = obj
    return found


def _remember(function: Any, arguments: Any) -> None:
    called = _called(function, arguments)
    for key in [key for key, refs in _transforming.items() if any(ref() is None for ref in refs)]:
        del _transforming[key]
    _transforming[tuple(called)] = [*map(weakref.ref, called.values())]


def _needs_transforms(function: Any, arguments: Any) -> bool:
    if internals.transforms_active() or internals.forward_ad_active() or internals.saved_tensors_hooks_refused():
        return True
    if internals.function_modes_active() and running() is not None:
        return True  # its draws are those of a key
    refs = _transforming.get(tuple(_called(function, arguments))) if _transforming else None
    return refs is not None and all(ref() is not None for ref in refs)


def _functional(function: Any, contexts: Contexts, preserve_rng_state: bool) -> Callable[..., Any]:
    """`function` by the functional engine, under the same contexts."""
    forward, rerun = contexts
    if isinstance(forward, Selective):
        return remat(function, policy=forward.policy, preserve_rng_state=preserve_rng_state)
    if contexts is NO_CONTEXTS:
        return remat(function, preserve_rng_state=preserve_rng_state)
    in_turn = itertools.chain([forward], itertools.repeat(rerun))  # not a list: for a rerun that would begin again

    def under_context(*args: Any, **kwargs: Any) -> Any:
        with next(in_turn):
            return function(*args, **kwargs)

    return remat(under_context, preserve_rng_state=preserve_rng_state)


def _reentrant_under_transforms(function: Any, args: tuple[Any, ...], preserve_rng_state: bool) -> Any:
    """The reentrant variant where the functional engine has to do it."""
    if not any(internals.requires_grad_at_any_level(x) for x in args if isinstance(x, torch.Tensor)) and not (
        internals.transforms_active() or internals.forward_ad_active()
    ):
        warn_without_grad(args)
        with torch.no_grad():
            return function(*args)
    return remat(function, preserve_rng_state=preserve_rng_state)(*args)


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
    """Run functions one after the other, checkpointing all but the last of some segments of the sequence.

    **Arguments:**

    - `functions`: an `nn.Sequential`, or the functions; each is given what the one before returned.
    - `segments`: into how many segments to divide them, from 1 to their number.
    - `input`: what the first is given.
    - `use_reentrant`, `preserve_rng_state`: as for `checkpoint`.

    **Returns:** what the last function returned.

    **Raises:** `TypeError` for what is no function among them, or a number of segments that is no int; `ValueError` for
    one out of range, for no functions, and for other keywords.

    Examples:
        >>> import torch
        >>> from remat import checkpoint_sequential
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
        >>> checkpoint_sequential(model, 2, torch.ones(2, 3), use_reentrant=False).shape
        torch.Size([2, 3])
    """
    if use_reentrant is None:
        _warn_use_reentrant("checkpoint_sequential")
        use_reentrant = True
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    steps = check_steps(functions)
    if not isinstance(segments, numbers.Integral):
        raise TypeError(f"checkpoint_sequential: segments must be an int; got {shown(segments)}.")
    if not 1 <= segments <= len(steps):
        raise ValueError(
            f"checkpoint_sequential: segments must be in 1…{len(steps)}, the number of functions; got {segments}."
        )
    size = len(steps) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        segment = _one_after_another(tuple(steps[start : start + size]))
        input = checkpoint(segment, input, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return _one_after_another(tuple(steps[last:]))(input)


def _one_after_another(steps: tuple[Callable[[Any], Any], ...]) -> Callable[[Any], Any]:
    def run(input: Any) -> Any:
        for step in steps:
            input = step(input)
        return input

    return run


runs_again.update((checkpoint, checkpoint_sequential))
