"""What type checkers make of a program that uses remat: `make lint` runs mypy and pyright on it.

Each `type: ignore` is a mistake that both must find: an ignore that is not needed is an error in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import torch
from torch import Tensor, nn
from torch.func import grad

from remat import fori_loop, policies, remat
from remat.integrations import transformers
from remat.nn import RematReport, apply_remat, remat_module


@remat
def layer(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w)


@remat(policy=policies.dots_saveable, static_argnames="scale")
def scaled(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


def keep_large(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(ctx.op_output.numel() > 100)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(3))

    @remat
    def block(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scaled(layer(self.w, x), scale=scale)

    @remat(policy=["mm", "addmm"])
    def other(self, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    @remat
    def static(x: Tensor) -> Tensor:
        return x + 1

    @classmethod
    @remat
    def of_class(cls, x: Tensor) -> Tensor:
        return x + 1

    @remat
    def forward(self, x: Tensor) -> Tensor:  # no clash with nn.Module.forward
        return self.other(self.block(self.block(x), scale=2.0))


net, x = Net(), torch.ones(2, 3)
assert_type(layer(net.w, x), Tensor)
assert_type(net.block(x), Tensor)
assert_type(net.other(x), Tensor)
assert_type(net.static(x), Tensor)
assert_type(net.of_class(x), Tensor)
assert_type(remat(net), Net)  # a module keeps its type, too
assert_type(remat(policy=policies.nothing_saveable)(net), Net)
assert_type(remat(scaled, policy=keep_large)(x), Tensor)
assert_type(remat_module(Net(), policy=keep_large), Net)
assert_type(apply_remat(nn.Sequential(Net()), Net, policy=["mm"]), RematReport)
assert_type(fori_loop(0, 3, lambda i, x: x * i, x, policy=policies.dots_saveable), Tensor)
assert_type(policies.dots_saveable | ["bmm"], policies.Policy)
assert_type(policies.first_of(keep_large, policies.nothing_saveable), policies.Policy)
grad(lambda x: net.forward(x).sum())(x)

if TYPE_CHECKING:
    layer(1, x)  # type: ignore
    scaled(x, scale="2")  # type: ignore
    net.block(1)  # type: ignore
    net.block(x, x)  # type: ignore
    net.other()  # type: ignore
    net.static(1)  # type: ignore
    net.of_class(1)  # type: ignore
    remat(net).forward(1)  # type: ignore
    remat(3)  # type: ignore
    remat(layer, policy=3)  # type: ignore
    remat(layer, policy="dots_saveable")  # type: ignore
    remat(layer, policy=policies.save_ops)  # type: ignore
    remat(layer, static_argnums="x")  # type: ignore
    remat_module(net, policy="dots_saveable")  # type: ignore
    apply_remat(net, Net, policy=3)  # type: ignore
    transformers.enable(net, policy=policies.save_ops)  # type: ignore
    fori_loop(0, 3, lambda i, x: x * i, x, policy="mm")  # type: ignore
    policies.dots_saveable | 3  # type: ignore
    policies.as_policy("mm")  # type: ignore
