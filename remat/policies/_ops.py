"""Ops by name: the ops that a spelling stands for, and whether a policy can ever see them."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch

from remat import _torch_internals as internals
from remat._errors import shown

# The ops that a composite op runs below autograd, for the composite ops that people name most.
_MADE_OF = {
    name: made_of.split()
    for line in """
        adaptive_avg_pool2d: _adaptive_avg_pool2d mean
        batch_norm instance_norm: native_batch_norm cudnn_batch_norm
        bilinear: _trilinear
        contiguous: clone
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d: convolution
        cross_entropy_loss: _log_softmax nll_loss_forward
        dropout: native_dropout bernoulli_ mul
        einsum: bmm
        flatten reshape: view _unsafe_view clone
        group_norm: native_group_norm
        inner: mm dot
        layer_norm: native_layer_norm
        linalg_multi_dot tensordot: mm
        linear: addmm mm
        log_softmax: _log_softmax
        matmul: mm bmm mv dot
        max_pool2d: max_pool2d_with_indices
        outer: mul
        rms_norm: rsqrt mul
        scaled_dot_product_attention: _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention \
            _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu bmm
        softmax: _softmax
        square: pow
        to: _to_copy
    """.strip().splitlines()
    for names, _, made_of in [line.partition(":")]
    for name in names.split()
}

# A composite op is seen as itself only where a backend has a kernel of its own for it.
_BACKENDS = ("CPU", "CUDA", "MPS", "XPU", "XLA", "HPU", "PrivateUse1", "Meta")


def _composite(op: Any) -> bool:
    has_kernel = op.has_kernel_for_dispatch_key
    return has_kernel("CompositeImplicitAutograd") and not any(map(has_kernel, _BACKENDS))


def _known() -> set[str]:
    """All overloads as they are written in Python (`aten.mm.default`), without those of TorchScript."""
    dotted = (name.replace("::", ".") for name in internals.op_names())
    return {name if name.count(".") == 2 else f"{name}.default" for name in dotted}


def _matching(spellings: Collection[str], known: set[str]) -> list[Any]:
    """The overloads that the spellings stand for: none for an op that this torch does not have."""
    names = (name for name in known if name in spellings or name.rpartition(".")[0] in spellings)
    return [operator.attrgetter(name)(torch.ops) for name in names]


def _is_seen(ops: list[Any]) -> bool:
    """Whether a policy ever sees one of the overloads. The `out=` overload of a packet does not count."""
    return not all(map(_composite, [op for op in ops if not op._schema.is_mutable] or ops))


def spell(who: str, op: Any) -> str:
    """The one spelling of an op (`aten.mm.default`), or of all its overloads (`aten.mm`).

    **Arguments:**

    - `who`: the function that the user called, for errors.
    - `op`: an overload, a packet, or a name.

    **Raises:** `TypeError` if it is not an op; `ValueError` for an op that does not exist, is ambiguous, or is never
    seen.
    """
    known = _known()
    if not isinstance(op, (str, *internals.OP_KINDS)):
        raise TypeError(
            f"{who}: an op is an overload (torch.ops.aten.mm.default), a packet (torch.ops.aten.mm) or "
            f"a name ('aten.mm'); got {shown(op)}.{_hint(op, known)}"
        )
    dotted = _find(who, op.replace("::", "."), known) if isinstance(op, str) else str(op)
    if dotted in ("aten.detach", "aten.detach.default"):
        raise ValueError(f"{who}: a policy is never asked about {dotted}: name the op whose result it detaches.")
    if not _is_seen(_matching([dotted], known)):
        made_of = ", ".join(f"aten.{name}" for name in _MADE_OF.get(dotted.split(".")[1], []))
        raise ValueError(
            f"{who}: {dotted} is never seen by a policy: it is made of other ops, and only those run below "
            f"autograd. " + (f"Name what it becomes: {made_of}." if made_of else "Name those.")
        )
    return dotted


def _hint(op: Any, known: set[str]) -> str:
    """A hint for an object that is no op."""
    if isinstance(op, (list, tuple, set, frozenset)):
        return f" Unpack it: *{op!r}."
    name = getattr(op, "__name__", "")
    seen = [repr(f"aten.{n}") for n in (name, *_MADE_OF.get(name, [])) if _is_seen(_matching([f"aten.{n}"], known))]
    return f" Did you mean {' or '.join(seen)}?" if seen else ""


def _find(who: str, name: str, known: set[str]) -> str:
    spellings = known | {k.rpartition(".")[0] for k in known}
    for exact in (name, f"aten.{name}"):
        if exact in spellings:
            return exact
    found = sorted(s for s in spellings if s.endswith(f".{name}"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{who}: {name!r} may be {', '.join(found)}. Write one of them.")
    close = difflib.get_close_matches(name, spellings) or difflib.get_close_matches(f"aten.{name}", spellings)
    hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else "Import the library that defines it."
    if "." not in name:
        hint += f" If checkpoint_name gives this name, write policy=save_only_these_names({name!r})."
    raise ValueError(f"{who}: there is no op {name!r}. {hint}")


@functools.cache
def overloads(ops: tuple[str, ...]) -> frozenset[Any]:
    """The overloads that the spellings stand for, cached."""
    return frozenset(_matching(frozenset(ops), _known()))


def spell_all(who: str, ops: Iterable[Any]) -> tuple[str, ...]:
    """The spellings of several ops, sorted."""
    return tuple(sorted({spell(who, op) for op in ops}))
