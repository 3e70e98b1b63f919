"""Run the steps of a loop: as nested remat'd functions, or without a trace.

A loop needs no rules for derivatives: its derivatives, of every order and in both modes, are those of nested remat'd
functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from remat import _torch_internals as internals
from remat import _tree
from remat._context import RandomState
from remat._effects import tensors_in
from remat._errors import RematError, function_name
from remat._layers import innermost
from remat._remat import remat
from remat._rerun_look import TrialLook
from remat.loops._checks import differ, kinds_of, named, paths, structure
from remat.loops._schedule import checkpoints_for, parts_of
from remat.policies._policy import PolicyLike
from remat.random._keyed import resumed, running


def run(
    who: str,
    user: Any,
    body: Callable[[int, Any, Any], tuple[Any, Any]],
    n: int,
    init: Any,
    checkpoints: int | None,
    policy: PolicyLike,
    xs: Any = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run `body` n times. Returns the last carry, and all y joined.

    **Arguments:**

    - `who`, `user`: the loop and the user's function, which errors name.
    - `body`: (step number, carry, x) -> (carry, y). x, the step's slice of `xs`, and y have a leading dimension of 1.
    - `xs`: a tree of tensors with the steps as leading dimension, and None.
    - `reverse`: whether the first step takes the last slice of `xs`.
    """
    if n == 0:
        return init, None

    def segment(again: Any, start: int, n: int, k: int, carry: Any, xs: Any, outermost: bool = False) -> Any:
        parts, ys = parts_of(n, k), []
        for (m, slots), x in zip(parts, _split(xs, [m for m, _ in parts], reverse), strict=True):
            step = once if slots or outermost else body  # a rerun takes the derivative of its last step right away
            carry, y = again(again, start, m, slots, carry, x) if m > 1 else step(start, carry, x)
            ys.append(y)
            start += m
        return carry, _joined(who, ys, reverse)

    segment.__qualname__ = body.__qualname__ = f"{who}({function_name(user)})"
    once = remat(body, policy=policy)
    return segment(remat(segment), 0, n, checkpoints_for(who, n, checkpoints), init, xs, True)


def _split(xs: Any, sizes: list[int], reverse: bool) -> list[Any]:
    """Split `xs` along the leading dimension."""
    leaves, spec = _tree.flatten(xs)
    order = slice(None, None, -1 if reverse else 1)
    pieces = [[None] * len(sizes) if x is None else x.split(sizes[order]) for x in leaves]
    return [_tree.unflatten(spec, [piece[i] for piece in pieces]) for i in range(len(sizes))][order]


def _joined(who: str, parts: list[Any], reverse: bool) -> Any:
    """Join the results y of several parts along their leading dimension."""
    if all(part is None for part in parts):
        return None  # `fori_loop` and `while_loop` have no y
    (first, spec), *rest = flat = [_tree.flatten(part) for part in parts]
    kinds = kinds_of(first, 1)
    for others, other in rest:
        if differ(other, spec):
            raise TypeError(f"{who}: y is {structure(spec)} in one step, and {structure(other)} in another.")
        for i, (a, b) in enumerate(zip(kinds, kinds_of(others, 1), strict=True)):
            if a != b:
                raise TypeError(f"{who}: {paths(spec, 'y')[i]} is {named(a)} in one step, and {named(b)} in another.")
    rows = zip(*(others for others, _ in (flat[::-1] if reverse else flat)), strict=True)
    return _tree.unflatten(spec, [None if row[0] is None else torch.cat(row) for row in rows])


@contextlib.contextmanager
def trial(who: str, args: Any, pure: Any = None) -> Iterator[TrialLook]:
    """Run the block without derivatives. Afterwards, undo its random draws and its changes in place.

    `pure`: the user's function in the block, if there must not be any.
    """
    keys = running()
    random = RandomState(tensors_in(args), keyed=keys is not None)
    look = TrialLook(who, (), random)  # in a rerun, the function around knows what stands for the arguments
    start: Any = None if keys is None else keys.position()
    try:
        with torch.no_grad(), internals.NOTHING if keys is None else resumed(keys.key, start), look:
            yield look
            drew = random.drawn_since(look.drew) or ((now := running()) is not None and now.position() != start)
            if pure is not None and (drew or look.copies):
                raise RematError(
                    f"{who}: {function_name(pure)} draws random numbers or changes a tensor in place. The loop calls "
                    "it only to count the steps, and undoes that. Do it in body_fun, and put the result into the value."
                )
    finally:
        random.put_back()
        with torch.no_grad(), internals.DisableTorchFunction(), internals.no_transforms():
            for key, before in look.copies.items():
                innermost(look.outside[key].value).copy_(innermost(before))
