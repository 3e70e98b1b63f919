"""The ops that a policy names, and those that it names in vain."""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from remat import _torch_internals as internals
from remat._errors import warn
from remat.policies import Policy, as_policy
from remat.policies._ops import OpOverload, OpOverloadPacket, spell


def policy_of_ops(ops: tuple[Any, ...]) -> Policy:
    """The policy that keeps the results of these ops. Raises ValueError for what is none."""
    for op in ops:
        if not isinstance(op, (OpOverload, internals.HigherOrderOperator)):
            hint = f" Name one of its overloads, as in {op}.{op.overloads()[0]}." if _is_packet(op) else ""
            raise ValueError(
                f"create_selective_checkpoint_contexts: expected an OpOverload such as torch.ops.aten.mm.default; got "
                f"{type(op).__name__} {op!r}.{hint}"
            )
        if _never_seen(op):
            warn_in_vain(op)
    saved = frozenset(ops)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op in saved

    return as_policy(policy)


def _is_packet(op: Any) -> bool:
    return isinstance(op, OpOverloadPacket)


@functools.cache
def _why_never_seen(op: Any) -> str | None:
    try:
        spell("create_selective_checkpoint_contexts", op)
    except ValueError as error:
        return str(error)
    return None


def _never_seen(op: Any) -> bool:
    return isinstance(op, OpOverload) and _why_never_seen(op) is not None


def warn_in_vain(op: Any) -> None:
    """Say why no op that runs equals one that a policy names."""
    reason = _why_never_seen(op) or (
        f"create_selective_checkpoint_contexts: {op}, which the policy names, stands for several ops and equals none "
        f"of them, so it never runs. Name the overload, as in {op}.{op.overloads()[0]}."
    )
    warn(reason)


def named_in_vain(policy: Any) -> Iterator[Any]:
    """The ops that a policy function compares with and that no op that runs can equal, as far as its code shows."""
    while isinstance(policy, functools.partial):
        yield from _vain(policy.args)
        yield from _vain([*policy.keywords.values()])
        policy = policy.func
    policy = getattr(policy, "__func__", policy)
    if not isinstance(policy, types.FunctionType):
        return
    names = {name for code in _codes(policy.__code__) for name in code.co_names}
    if any("overloadpacket" in name for name in names):
        return  # it compares packets
    for cell in policy.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            yield from _vain(cell.cell_contents)
    for name in names & policy.__globals__.keys():
        yield from _vain(policy.__globals__[name])
    yield from _vain(policy.__defaults__)
    for code in _codes(policy.__code__):
        yield from _vain(_looked_up(code, policy.__globals__))


def _vain(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return [x for item in value for x in _vain(item)]
    return [value] if _is_packet(value) or _never_seen(value) else []


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


_NAMESPACES = (types.ModuleType, type(torch.ops.aten))


def _looked_up(code: types.CodeType, namespace: dict[str, Any]) -> list[Any]:
    """What chains of attributes in the code stand for that begin with a global module, as `torch.ops.aten.mm` does."""
    found: list[Any] = []
    for first, *names in _chains(code):
        value = namespace.get(first)
        if isinstance(value, _NAMESPACES):
            for name in names:
                value = getattr(value, name, None)
            found.append(value)
    return found


@functools.lru_cache(1000)
def _chains(code: types.CodeType) -> list[list[str]]:
    """A name of a global and the names of attributes that are looked up from there, for each such place in the code."""
    found: list[list[str]] = []
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            chain = [instruction.argval]
            found.append(chain)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(instruction.argval)
        else:
            chain = []
    return found
