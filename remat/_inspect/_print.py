"""Print the residuals of a function, and what remat changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat._inspect._costs import costs_of_gradient
from remat._inspect._forward import check, setting
from remat._inspect._mistakes import Watched
from remat._inspect._residuals import format_residuals, saved_residuals, total_bytes
from remat._inspect._tables import bytes_text, flops_text, seconds_text
from remat._remat import plainly, watching


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
    print(
        format_residuals(residuals),
        f"held besides arguments and captured tensors: {held}; without remat: {held_plainly}",
        f"forward and backward: {seconds_text(seconds)}; without remat: {seconds_text(plain_seconds)}",
        f"recomputed on backward: {flops_text(flops - plain_flops)} of {flops_text(plain_flops)}",
        *dict.fromkeys(mistakes),
        sep="\n",
    )
