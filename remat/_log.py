"""What is remembered of a run, and how a rerun is compared with it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import PURITY, CheckpointError, call_site

_MADE_ANEW = (
    "remat: {} changes a tensor of shape {}, {} in place, read at {}, that no torch function was seen to make and that "
    "is another one in the rerun. If it has the memory of an array, make a tensor of its own: torch.tensor(array)."
)


class Signature(NamedTuple):
    """What is compared of a call."""

    func: Any
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """What `results_of` says of them."""
    reads: tuple[Any, ...]
    """Its arguments: a `Read` for each tensor from outside, None for one made inside, other values as they are."""

    def __str__(self) -> str:
        name = torch.overrides.resolve_name(self.func) or getattr(self.func, "__qualname__", repr(self.func))
        return f"{name} -> " + ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.results)


class Read(NamedTuple):
    """A tensor from outside, as an argument: the how-manieth that the run was given or read first."""

    number: int


class Log:
    """What is remembered of a run, to be compared with a rerun."""

    def __init__(self) -> None:
        self.calls: list[Signature] = []
        self.incidental: set[int] = set()
        """The positions of calls whose results are not differentiated: what they compute may be there already."""
        self.tail: int | None = None
        """The position of the last product, if no later call reads values. See `remat._tail`."""
        self.hooks: list[int | None] = []
        """Of each hook that was put on a tensor: the level of that, 0 below all; None in a transform of its own."""
        self.constant_reads: dict[tuple[Any, int], weakref.ref[Tensor]] = {}
        """Of the calls that touch constants alone: the function, and the identity of a tensor that it read."""
        self.known_reads: set[tuple[Any, Read]] = set()
        """The same, by what the tensor has come from."""
        self.reads_values = False
        """Whether it has got numbers that were computed from tensors."""

    def note(self, signature: Signature, out: Any) -> None:
        """One more call, which returned `out`."""
        if not _differentiated(out):
            self.incidental.add(len(self.calls))
        self.calls.append(signature)

    def finish(self) -> None:
        """The run is over. What has died since counts no more: an operand may have its identity."""
        self.constant_reads = {pair: ref for pair, ref in self.constant_reads.items() if ref() is not None}

    def call(self, position: int) -> Signature | None:
        """The call at a position, None after the last."""
        return self.calls[position] if position < len(self.calls) else None


def results_of(out: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each tensor that a call returned. The lengths in a nested tensor are new symbols each time."""
    if isinstance(out, Tensor):
        return ((() if out.is_nested else out.shape, out.dtype),)
    if isinstance(out, (tuple, list)):
        return tuple((() if o.is_nested else o.shape, o.dtype) for o in out if isinstance(o, Tensor))
    return ()


def _differentiated(out: Any) -> bool:
    """Whether a result of a call is differentiated."""
    if isinstance(out, Tensor):
        return internals.requires_grad_at_any_level(out)
    return any(isinstance(t, Tensor) and internals.requires_grad_at_any_level(t) for t in out)


def _same(expected: Any, actual: Any, rounded: bool) -> bool:
    """Whether two arguments are the same. `rounded`: whether a number may have been rounded in another way."""
    if isinstance(expected, tuple) and isinstance(actual, tuple):
        return len(expected) == len(actual) and all(_same(e, a, rounded) for e, a in zip(expected, actual, strict=True))
    if isinstance(expected, float) and isinstance(actual, float):
        is_close = rounded and math.isclose(expected, actual, rel_tol=1e-4, abs_tol=1e-8)
        return is_close or expected == actual or (expected != expected and actual != actual)
    return type(expected) is type(actual) and expected == actual


class Comparison:
    """A rerun is compared with its forward, call by call."""

    def __init__(self, name: str, forward: Log) -> None:
        """`name`: of the function. `forward`: what is remembered of it."""
        self._name = name
        self._forward = forward
        self._position = 0
        self._hooks = iter(forward.hooks)
        self.operands: dict[Read, Tensor] = {}
        """What is read in the place of what the forward read from outside."""
        self.written: set[Read] = set()
        """Those that the forward has written to."""

    def next(self, actual: Signature, out: Any) -> None:
        """The next call is this one, and returned `out`. Raises CheckpointError where the forward made another."""
        forward = self._forward
        if actual == forward.call(self._position):
            self._position += 1
            return
        position = self._position
        while (expected := forward.call(position)) is not None and actual[:2] != expected[:2]:
            if position not in forward.incidental:
                break
            position += 1
        if expected is not None and actual[:2] == expected[:2]:
            self._position = position
        elif self._position not in forward.incidental and not _differentiated(out):
            return  # it touches no derivative
        expected = forward.call(self._position)
        self._position += 1
        if actual == expected:
            return
        where = f"remat: the rerun of {self._name} differs from its forward run at call {self._position}: {actual}"
        if expected is None or actual[:2] != expected[:2]:
            ended = "had ended" if expected is None else f"ran {expected}"
            raise CheckpointError(f"{where} at {call_site()}, where the forward {ended}. {PURITY}")
        now, then = self._known(actual.reads), self._known(expected.reads)
        if not _same(then, now, forward.reads_values):
            raise CheckpointError(
                f"{where} at {call_site()} got the arguments {_arguments(now)}, where the forward got "
                f"{_arguments(then)}. {PURITY}"
            )

    def _known(self, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments without the tensors that look as if they came from outside, but are made anew by each run."""
        return tuple(
            (r if r in self.operands else None) if type(r) is Read else self._known(r) if type(r) is tuple else r
            for r in reads
        )

    def as_in_forward(self, func: Any, args: Any, kwargs: Any, outside: Container[int]) -> tuple[Any, dict[str, Any]]:
        """The arguments of the next call, with what the forward read in the place of tensors that are new to the run.

        They may be made anew by each run (`from_numpy`). `finish` sees to it that they are.

        **Arguments:**

        - `outside`: the identities of tensors that no call was seen to make.
        """
        expected = self._forward.call(self._position)
        if expected is None or expected.func is not func or len(expected.reads) != len(args) + len(kwargs):
            return args, kwargs
        found = self._as_read((*args, *kwargs.values()), expected.reads, outside)
        return found[: len(args)], dict(zip(kwargs, found[len(args) :], strict=True))

    def _as_read(self, arg: Any, then: Any, outside: Container[int]) -> Any:
        """An argument, by what the forward read. No function in a function: one that calls itself is a cycle."""
        if isinstance(arg, Tensor):
            if id(arg) not in outside or then not in self.operands:
                return arg
            if then in self.written:
                raise CheckpointError(_MADE_ANEW.format(self._name, list(arg.shape), arg.dtype, call_site()))
            return self.operands[then]
        if type(arg) in (tuple, list) and type(then) is tuple and len(arg) == len(then):
            return type(arg)(self._as_read(a, t, outside) for a, t in zip(arg, then, strict=True))
        return arg

    def at_tail(self, func: Any) -> bool:
        """Whether the next call is the last product, of which nobody reads the value."""
        tail = self._forward.tail
        if tail is None or tail != self._position:
            return False
        expected = self._forward.call(tail)
        return expected is not None and expected.func == func

    def next_hook(self) -> int | None:
        """The level of the tensor that the forward has put the next hook on."""
        return next(self._hooks, None)

    def has_read(self, func: Any, key: int, read: Read | None) -> bool:
        """Whether a call of `func` that touched constants alone read the tensor with this identity, or this `Read`."""
        log = self._forward
        return (func, key) in log.constant_reads or (read is not None and (func, read) in log.known_reads)

    def finish(self) -> None:
        """Check that the rerun ran to the end of what the forward ran."""
        for position in range(self._position, len(self._forward.calls)):
            if position not in self._forward.incidental:
                raise CheckpointError(
                    f"remat: the rerun of {self._name} ended after {position} of {len(self._forward.calls)} torch "
                    f"calls; the forward went on with {self._forward.calls[position]}. {PURITY}"
                )


def _arguments(reads: tuple[Any, ...]) -> str:
    """The arguments of a call in words."""

    def word(read: Any) -> str:
        if isinstance(read, Read):
            return f"tensor {read.number} from outside"
        return "a tensor made inside" if read is None else _arguments(read) if isinstance(read, tuple) else repr(read)

    return f"({', '.join(map(word, reads))})"
