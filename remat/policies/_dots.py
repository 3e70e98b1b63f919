"""Policies that keep the results of matrix multiplications, the most expensive ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from remat.policies._by_name import check_places
from remat.policies._policy import ByOp, Policy

_NAMES = """
    mm addmm _addmm_activation bmm baddbmm addbmm mv addmv dot vdot linear mkldnn_linear matmul _trilinear
    _int_mm _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2
    _weight_int8pack_mm _weight_int4pack_mm _sparse_mm _cslt_sparse_mm _sparse_semi_structured_mm
    _sparse_semi_structured_linear
    convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_transpose
    cudnn_convolution_relu miopen_convolution mkldnn_convolution _mps_convolution
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math_for_mps
    _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward
"""
DOTS = tuple(f"aten.{name}" for name in _NAMES.split())
"""The dots, as policies spell them, with those that this torch does not have."""

# Calls in the user's code that make one dot, so their arguments show its batch dimensions. Others may make several.
_CALLS = """
    matmul rmatmul imatmul linalg_matmul mm bmm mv dot vdot addmm baddbmm addbmm addmv linear bilinear
    tensordot inner einsum chain_matmul linalg_multi_dot scaled_dot_product_attention
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
"""
_NEVER_BATCHED = ("tensordot", "inner", "bilinear", "trilinear", "addbmm", "chain_matmul", "linalg_multi_dot")
_ADDED_TO = ("addmm", "addmm_activation", "baddbmm", "addmv")  # the first tensor is added, not multiplied


def _name(func: Any) -> str:
    """`matmul` for `torch.matmul`, `Tensor.__matmul__` and `aten.matmul.default`."""
    return str(getattr(func, "__name__", "")).partition(".")[0].strip("_")


def _has_batch_dims(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
    """Whether a call multiplies several pairs of matrices instead of one.

    As in `jax.numpy.matmul`, a dimension of size 1 is no batch dimension.
    """
    name = _name(func)
    if name in _NEVER_BATCHED or "conv" in name:
        return False
    if name == "einsum" and isinstance(args[0], str):
        return _einsum_has_batch_dims(args[0], args[1:])
    tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
    factors = tensors[1:3] if name in _ADDED_TO else tensors[:2]
    batches = (reversed(t.shape[:-2]) for t in factors)
    return len(factors) == 2 and any(m != 1 and n != 1 for m, n in zip(*batches, strict=False))


def _einsum_has_batch_dims(equation: str, operands: Sequence[Any]) -> bool:
    """Whether an index is in several operands and in the result. Without `->`, only `...` can be."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if any(sum(index in term for term in terms) > 1 for index in set(result) - {"."}):
        return True
    tensors = operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    wide = [t for t, term in zip(tensors, terms, strict=True) if "..." in term and t.dim() > len(term) - 3]
    return len(wide) > 1 and ("..." in result or not arrow)


@dataclass(frozen=True, repr=False)
class _Dots(ByOp):
    """Keeps the results of dots: matrix multiplications, convolutions and fused attention.

    `dots_saveable` keeps all of them. `dots_with_no_batch_dims_saveable` leaves out dots that multiply many pairs of
    matrices at once, as in attention: their results are often larger than their arguments. The call in the user's
    function decides, so a `vmap` over the function makes no difference. For a call that makes several dots, such as
    `multi_head_attention_forward`, and under torch's selective checkpointing, the aten op decides.

    **Source:** `jax.checkpoint_policies`.

    Examples:
        >>> import torch
        >>> from torch.func import grad
        >>> from remat import remat
        >>> from remat.policies import dots_with_no_batch_dims_saveable
        >>> @remat(policy=dots_with_no_batch_dims_saveable)
        ... def attention(w, x):
        ...     q, k, v = (x @ w).chunk(3, -1)  # kept
        ...     return (q @ k.mT).softmax(-1) @ v  # computed again
        >>> def loss(w):
        ...     return attention(w, torch.ones(2, 4, 3)).sum()
        >>> grad(loss)(torch.ones(3, 6)).shape
        torch.Size([3, 6])
    """

    batched: bool = False

    def __call__(self, ctx: Any = None, op: Any = None, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        decision = super().__call__(ctx, op)
        if self.batched or decision is self.other:
            return decision
        # Under a vmap every op may have batch dimensions, so look at the call that the user wrote.
        call = getattr(ctx, "call", None)
        if call is None or _name(call[0]) not in _CALLS.split():
            call = op, args, kwargs
        return self.other if _has_batch_dims(*call) else decision

    def by_op(self, op: Any) -> CheckpointPolicy | None:
        decision = super().__call__(None, op)
        return decision if self.batched or decision is self.other else None


dots_saveable: Policy = _Dots("dots_saveable", DOTS, batched=True)
checkpoint_dots: Policy = dots_saveable
dots_with_no_batch_dims_saveable: Policy = _Dots("dots_with_no_batch_dims_saveable", DOTS)
checkpoint_dots_with_no_batch_dims: Policy = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(offload_src: str = "device", offload_dst: str = "pinned_host") -> Policy:
    """Offload the values that `dots_with_no_batch_dims_saveable` saves to CPU memory.

    **Arguments:**

    - `offload_src`: the source of the move; always "device".
    - `offload_dst`: the target of the move; always "pinned_host".

    **Returns:** the policy.

    **Raises:** `ValueError` for another source or target.

    **Source:** `jax.checkpoint_policies.offload_dot_with_no_batch_dims`.

    Examples:
        >>> from remat.policies import offload_dot_with_no_batch_dims
        >>> policy = offload_dot_with_no_batch_dims("device", "pinned_host")
    """
    check_places("offload_dot_with_no_batch_dims", offload_src, offload_dst)
    return _Dots("offload_dot_with_no_batch_dims()", DOTS, CheckpointPolicy.MUST_CPU_OFFLOAD)
