"""List the values that are held between the forward and the backward of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat._call import Call
from remat._errors import call_site
from remat._inspect._costs import costs_of_gradient
from remat._inspect._forward import check, forward, root_nodes, setting, tensors_behind
from remat._inspect._mistakes import Watched
from remat._inspect._origins import Names, Origins
from remat._inspect._residuals import Held, Residual, format_residuals, total_bytes
from remat._inspect._tables import bytes_text, flops_text, seconds_text
from remat._remat import plainly, watching
from remat._saved import nodes_behind


def saved_residuals(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Residual]:
    """List the values that are held in memory between the forward and the backward of a function.

    The function runs. Then each storage is listed that its graph holds: values that the function computed, and the
    arguments and captured tensors that the backward reads, which would be in memory anyway. The list includes the
    values that policies keep in remat'd functions and in calls of `remat.checkpoint`.

    The list assumes a `.backward()` to the tensors that require grad. If no argument and no captured tensor requires
    grad, it assumes the gradients of all arguments.

    **Arguments:**

    - `fun`: any function: a remat'd function, one that calls remat'd functions, or a plain one.
    - `args`, `kwargs`: its arguments.

    **Returns:** the residuals, each storage once: arguments, then captured tensors, then computed values.

    **Raises:** `TypeError` if `fun` is no function; `RematError` inside a transform of `torch.func`.

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
    check("saved_residuals", fun)
    here = call_site()
    with setting(watching, watching.get() or Watched(_ignore)):
        origins = Origins()
        with origins:
            out, args, kwargs = forward(fun, args, kwargs)
    held = Held(Names(fun, args, kwargs), origins)
    roots = root_nodes(out)
    out = None
    nodes = nodes_behind(roots)
    for t in tensors_behind(nodes):
        held.add_saved(t, here)
    for node in nodes:
        link = getattr(node, "link", None)
        if link is not None and isinstance(getattr(getattr(link, "fn", None), "call", None), Call):
            held.add_kept(link.fn.call)
    held.add_made()
    return sorted(held.residuals, key=lambda r: held.names.rank(r.why))


def _ignore(message: str) -> None:
    """Drop the warnings of the watcher."""


def print_saved_residuals(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Print the residuals of a function, and compare its memory and time with and without remat.

    The table lists the result of `saved_residuals`. The lines below it show the bytes that the function computes and
    holds, the time of forward and backward, and the floating point operations that the backward repeats (of ops that
    `torch.utils.flop_counter` knows). Warnings of common mistakes follow: see `REMAT_LOG` in the documentation.

    **Arguments:**

    - `fun`: the function, as for `saved_residuals`. It and its backward run several times; no `.grad` changes.
    - `args`, `kwargs`: its arguments.

    **Raises:** as `saved_residuals`.

    **Source:** `jax.ad_checkpoint.print_saved_residuals`.

    Examples:
        >>> import torch
        >>> from remat import print_saved_residuals, remat
        >>> layer = remat(lambda w, x: torch.sin(x @ w))
        >>> print_saved_residuals(layer, torch.eye(2), torch.ones(3, 2))
        size  tensor ...
        16 B  float32[2, 2]  cpu     from the argument w  ...
        24 B  float32[3, 2]  cpu     from the argument x  ...
        held besides arguments and captured tensors: 0 B; without remat: 24 B
        forward and backward: ...; without remat: ...
        recomputed on backward: 24 FLOP of 72 FLOP
    """
    check("print_saved_residuals", fun)
    mistakes: list[str] = []
    with setting(watching, Watched(mistakes.append)):
        residuals = saved_residuals(fun, *args, **kwargs)
        flops, seconds = costs_of_gradient(fun, args, kwargs)
    with setting(plainly, True):
        plain = saved_residuals(fun, *args, **kwargs)
        plain_flops, plain_seconds = costs_of_gradient(fun, args, kwargs)
    held, held_plainly = bytes_text(total_bytes(residuals)), bytes_text(total_bytes(plain))
    lines = [
        format_residuals(residuals),
        f"held besides arguments and captured tensors: {held}; without remat: {held_plainly}",
        f"forward and backward: {seconds_text(seconds)}; without remat: {seconds_text(plain_seconds)}",
        f"recomputed on backward: {flops_text(flops - plain_flops)} of {flops_text(plain_flops)}",
        *dict.fromkeys(mistakes),
    ]
    print("\n".join(lines))
