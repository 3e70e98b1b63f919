"""In modes of ours, ops do what they do without one."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same, numbers
from torch import Tensor

from remat import checkpoint, policies, remat
from remat.compat import create_selective_checkpoint_contexts
from remat.debug import LiveBytes
from remat.random import key, keyed


def inverted(a: Tensor) -> Tensor:
    return torch.view_as_real(torch.linalg.pinv(a)).cos()


def under(mode: Any) -> Callable[[Any], Any]:
    def way(fun: Any) -> Any:
        def call(a: Tensor) -> Tensor:
            with mode():
                return fun(a)

        return call

    return way


def selective(fun: Any) -> Any:
    make = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return lambda a: checkpoint(fun, a, use_reentrant=False, context_fn=make)


MODES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda fun: remat(fun, policy=policies.save_ops()),
    "dots": lambda fun: remat(fun, policy=policies.dots_saveable),
    "everything": lambda fun: remat(fun, policy=policies.everything_saveable),
    "selective": selective,
    "debug": lambda fun: lambda a: checkpoint(fun, a, use_reentrant=False, debug=True),
    "LiveBytes": under(LiveBytes),
    "keyed": lambda fun: functools.partial(keyed(fun), key(0)),
}


@pytest.mark.parametrize("way", MODES)
def test_what_a_kernel_conjugates(way: str) -> None:
    """In a mode, torch's `pinv` of complex matrices is another one: pytorch/pytorch#198118. Not in ours."""

    def run(fun: Any) -> list[Tensor]:
        a = torch.complex(numbers(3, 3), numbers(3, 3).cos()) + torch.eye(3)
        a.requires_grad_()
        y = fun(a)
        y.sum().backward()
        return [y.detach(), a.grad]

    assert_same(run(MODES[way](inverted)), run(inverted))


@pytest.mark.parametrize("way", ["dots", "selective", "LiveBytes"])
def test_no_function_of_dynamo_around_each_op(way: str) -> None:
    """There would be one around the handler of a mode that does not say that it needs none."""

    def calls(n: int) -> list[int]:
        fun = MODES[way](lambda x: functools.reduce(lambda y, _: y.sin(), range(n), x @ x))
        x = numbers(3, 3).requires_grad_()
        files: list[str] = []
        sys.setprofile(lambda frame, event, arg: files.append(frame.f_code.co_filename) if event == "call" else None)
        try:
            fun(x).sum().backward()
        finally:
            sys.setprofile(None)
        return [sum(name in file for file in files) for name in ("_dynamo", "remat")]

    calls(1)  # what is filled and imported on first use
    (of_dynamo, ours), (more_of_dynamo, more_ours) = calls(1), calls(9)
    assert more_ours > ours
    assert more_of_dynamo == of_dynamo
