"""A transformer with each block under checkpointing: memory, time and FLOPs of its derivatives.

8 blocks of width 256 with 4 heads, on 4 x 256 tokens: all gradients by `.backward()` and by `torch.func.grad`. Two
such blocks: per-sample gradients and a Hessian-vector product with respect to the parameters. What runs under a
transform is measured with two policies too, which keep the results of matrix products, and of all ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from _common import Benchmark, Fun, Row, Run, ratio, runs
from _transformer import (
    Transformer,
    backward,
    gradient,
    hessian_vector_product,
    in_jax,
    per_sample_gradients,
)

from remat import policies, remat

POLICIES = {"dots_saveable": policies.dots_saveable, "everything_saveable": policies.everything_saveable}


def runs_and_policies(make: Callable[[Callable[[Fun], Fun]], Run]) -> dict[str, Run | str]:
    """`runs`, and with the policies."""
    return runs(make) | {f"remat, {name}": make(remat(policy=policy)) for name, policy in POLICIES.items()}


def over_no_remat(name: str, rows: dict[str, Row]) -> dict[str, float]:
    """How remat compares with no remat: without a policy, in its time for the products, and with each policy."""
    without, ours = rows["no remat"], rows["remat"]
    found = {
        f"{name}: time ÷ FLOPs / no remat": ours.over(without) / ratio(ours.flops, without.flops),
        f"{name}: peak / no remat": ratio(ours.peak, without.peak),
    }
    for policy in POLICIES:
        with_policy = rows[f"remat, {policy}"]
        found[f"{name}, {policy}: time / no remat"] = with_policy.over(without)
        found[f"{name}, {policy}: peak / no remat"] = ratio(with_policy.peak, without.peak)
    return found


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    depth, width, heads, batch, tokens = (2, 16, 2, 2, 16) if bench.fast else (8, 256, 4, 4, 256)
    x = torch.randn(batch, tokens, width)
    model = Transformer(depth, width, heads)

    by_jax = in_jax(depth, width, heads, batch, tokens)
    works = {
        ".backward()": runs(functools.partial(backward, model, x)),
        "grad": runs_and_policies(functools.partial(gradient, model, x)) | by_jax,
    }
    by_backward, by_grad = bench.measure(
        {f"{depth} blocks: {setting}": ways for setting, ways in works.items()}, rounds=9
    ).values()
    torchs = by_backward["torch, non-reentrant"]
    for name, ours in {"grad(remat)": by_grad["remat"], ".backward() of remat": by_backward["remat"]}.items():
        bench.ratios |= {
            f"{name}: peak / torch's .backward()": ratio(ours.peak, torchs.peak),
            f"{name}: time / torch's .backward()": ours.over(torchs),
            f"{name}: FLOPs / torch's .backward()": ratio(ours.flops, torchs.flops),
        }
    bench.ratios |= over_no_remat("grad", by_grad)

    two = Transformer(2, width, heads)
    works = {
        "per-sample gradients": runs_and_policies(functools.partial(per_sample_gradients, two, x)),
        "Hessian-vector product": runs_and_policies(functools.partial(hessian_vector_product, two, x)),
    }
    found = bench.measure({f"2 blocks: {name}": ways for name, ways in works.items()}, rounds=9)
    for name, rows in zip(works, found.values(), strict=True):
        bench.ratios |= over_no_remat(name, rows)
    bench.finish()


if __name__ == "__main__":
    main()
