"""Runs each op of PyTorch's own table of samples under remat, and compares with the plain function.

Usage: `python tests/every_op.py PART PARTS`. The ops compute from results of the function, so a rerun under a policy
skips what it can. An op that reads memory without telling a dispatch mode would read what was skipped.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from remat import policies, remat

LARGEST, MOST = 5_000, 4
"""How many elements a sample may have, and how many samples of an op are taken."""
WAYS: dict[str, Callable[[Any], Any]] = {
    "remat": remat,
    "dots_saveable": remat(policy=policies.dots_saveable),
    "everything_saveable": remat(policy=policies.everything_saveable),
}


def numbers_in(out: Any) -> list[Tensor]:
    """The tensors and numbers that an op returned, as real tensors."""
    found = []
    for x in tree_leaves(out):
        t = torch.tensor(float(x)) if isinstance(x, (int, float)) else x
        if not isinstance(t, Tensor):
            continue
        if t.is_nested:
            t = t.to_padded_tensor(0.0)
        elif t.layout is not torch.strided:
            t = t.to_dense()
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        if t.is_floating_point() or t.dtype in (torch.bool, torch.int64, torch.int32, torch.uint8):
            found.append(t.double())
    return found


def function_of(op: Any, sample: Any, differentiates: bool) -> Any:
    """A function that computes all that the op is given, and depends on its results."""

    def function(x: Tensor) -> Tensor:
        zero = (x if differentiates else x.detach()).sum() * 0

        def computed(t: Any) -> Any:
            if not isinstance(t, Tensor) or t.layout is not torch.strided or t.is_nested:
                return t
            t = t.detach()
            return t ^ (zero != 0) if t.dtype is torch.bool else t + zero.to(t.dtype)

        given, args, kwargs = tree_map(computed, (sample.input, sample.args, sample.kwargs))
        out = op.op(given, *args, **kwargs)
        total = sum((i + 1) * torch.nan_to_num(t).tanh().sum() for i, t in enumerate(numbers_in(out)))
        return (x * total).sin()

    return function


def gradient(function: Any) -> Tensor:
    torch.manual_seed(0)
    x = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(function(x).sum(), x)[0]


def is_same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, equal_nan=True)


def check(op: Any) -> tuple[int, list[str]]:
    """Returns how many comparisons were made, and the differences."""
    dtype = torch.float64 if torch.float64 in op.dtypes else torch.float32
    compared, differences = 0, []
    try:
        samples = unlike(op.sample_inputs("cpu", dtype))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # the table has none for this dtype
        return 0, []
    for sample in samples:
        for differentiates in (False, True):
            function = function_of(op, sample, differentiates)
            try:
                expected = gradient(function)
                if not is_same(expected, gradient(function)):  # `empty`
                    continue
            except Exception:  # the plain function fails
                continue
            for name, way in WAYS.items():
                compared += 1
                try:
                    actual: Any = gradient(way(function))
                except Exception as error:  # reported with the others
                    differences.append(f"{op.full_name}, {name}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                if not is_same(actual, expected):
                    differences.append(f"{op.full_name}, {name}: {actual.tolist()}, not {expected.tolist()}")
    return compared, differences


def unlike(samples: Iterable[Any]) -> list[Any]:
    """A few samples, whose arguments have other types."""
    found = {}
    for sample in samples:
        leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
        if sum(x.numel() for x in leaves if isinstance(x, Tensor)) <= LARGEST:
            found[tuple((type(x), x.dtype if isinstance(x, Tensor) else None) for x in leaves)] = sample
    return [*found.values()][-MOST:]


def main(part: int, parts: int) -> int:
    """Returns the exit status: whether an op differs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    compared, differences = 0, list[str]()
    for op in op_db[part::parts]:
        if not op.full_name.startswith(("empty", "new_empty")):  # whatever the memory holds
            count, found = check(op)
            compared, differences = compared + count, differences + found
    print(f"{compared} comparisons")
    print("\n".join(differences))
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
