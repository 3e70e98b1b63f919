"""Values: the contents of storages, known by what computed them.

A value gets the number of the op that computed it, of the values that the op read and of its other arguments. So the
same value is found again wherever a rerun asks for it, in whatever order the ops come; and where the rerun computes
something else, nothing is found. An op that writes in place makes a new value in the same storage.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import _torch_internals as internals
from remat._effects import GIVES_MEMORY_AWAY

Token = int


class Ref(NamedTuple):
    """A tensor that an op reads: the value of its storage, and how it lies there."""

    token: Token
    slot: int
    """Which of the values that the op reads, and apart from these, which of the storages that it writes to."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    def over(self, storage: Any) -> Tensor:
        """The tensor, over a storage with this value."""
        return laid_over(storage, self)


def laid_over(storage: Any, layout: Any) -> Tensor:
    """A tensor over a storage, as a `Ref` or an `Output` says that it lies there."""
    empty = torch.empty(0, dtype=layout.dtype, device=storage.device)
    tensor = empty.set_(storage, layout.offset, layout.size, layout.stride)
    if layout.conjugated:
        tensor = tensor.conj()
    return internals.negative_view(tensor) if layout.negated else tensor


_nans: dict[str, Any] = {}
_make_ref: Callable[[Any], Ref] = functools.partial(tuple.__new__, Ref)  # what `Ref` calls, but sooner


def ref_of(tensor: Tensor, token: Token, slot: int) -> Ref:
    """The tensor, as an op reads it."""
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    return _make_ref((token, slot, size, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg()))


def are_apart(a: Ref, b: Ref) -> bool:
    """Whether two tensors in one storage are known to have no element in common."""
    if a.dtype is not b.dtype or a.stride != b.stride or 0 in a.size or 0 in b.size:
        return False
    lengths = zip(a.stride, a.size, b.size, strict=True)
    steps = sorted(((stride, 1 - m, n - 1) for stride, m, n in lengths), reverse=True)
    return not _may_meet(a.offset - b.offset, steps)


def _may_meet(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether so many of the steps (length, least, most) may add up to a distance."""
    if not steps:
        return distance == 0
    (length, least, most), *rest = steps
    if length == 0:
        return _may_meet(distance, rest)
    low, high = sum(step * n for step, n, _ in rest), sum(step * n for step, _, n in rest)
    first, last = max(least, -((high - distance) // length)), min(most, (distance - low) // length)
    return last - first > 3 or any(_may_meet(distance - n * length, rest) for n in range(first, last + 1))


class OpCall(NamedTuple):
    """A call of an op, with a `Ref` in the place of each tensor."""

    schema: Schema
    token: Token
    args: Any
    kwargs: dict[str, Any]
    reads: list[Token]
    dtype: torch.dtype
    """The default dtype, which some ops go by."""

    def again(self, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        """Run the op once more, on values: what it was given, autocast had cast before."""
        now = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with internals.without_autocast():
                return self.schema.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(now)


class Values:
    """Gives the same number to the same value, in the forward and in every rerun."""

    def __init__(self, before: Values | None = None) -> None:
        """`before`: the numbers that were given already, and stay."""
        self._before = before
        self._first: int = 0 if before is None else before._first + len(before._numbers)
        self._numbers: dict[Any, Token] = {}
        self._outside: dict[int, tuple[weakref.ref[Any], Token]] = {}

    def number(self, *what: Any) -> Token:
        """The number of what was computed like this."""
        try:
            known = None if self._before is None else self._before._numbers.get(what)
            return known if known is not None else self._numbers.setdefault(what, self._first + len(self._numbers))
        except TypeError:  # an argument that can't be hashed: like nothing else
            return self.new()

    def new(self) -> Token:
        """A number that no other value has."""
        return self.number(object())

    def outside(self, storage: Any) -> Token:
        """The number of a storage that no op of the run made."""
        for values in (self._before, self):
            known = None if values is None else values._known(storage)
            if known is not None:
                return known
        token = self.new()
        self.set_outside(storage, token)
        return token

    def knows(self, storage: Any) -> bool:
        """Whether a storage from outside has got a number."""
        return self._known(storage) is not None

    def _known(self, storage: Any) -> Token | None:
        known = self._outside.get(id(storage))
        return known[1] if known is not None and known[0]() is storage else None

    def set_outside(self, storage: Any, token: Token) -> None:
        """Say what a storage from outside contains."""
        self._outside[id(storage)] = weakref.ref(storage), token


class Content:
    """What a storage contains."""

    __slots__ = ("is_constant", "is_shared", "made", "storage", "there", "token")

    def __init__(self, storage: Any, token: Token, made: bool, there: Token | None) -> None:
        self.storage = weakref.ref(storage)
        self.token = token
        """What the program has put there."""
        self.made = made
        """Whether an op of the run made the storage."""
        self.there = there
        """The value that is in the memory: another one, or none, as long as the ops that compute `token` are spared."""
        self.is_shared = False
        """Whether others have the memory too, and may change it between any two ops."""
        self.is_constant = False
        """Whether what is there is known by its bytes."""


class NotPlainError(Exception):
    """A tensor is not `plain`, or an op writes to memory that others have too."""


class Reader:
    """The values of the storages of one run."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.outside: list[tuple[Token, Any]] | None = None
        """Where to hold the storages with values that no op of the run has computed."""
        self._contents: dict[int, Content] = {}
        self._draws = 0
        self._looks = 0
        self._given_away: list[range] = []
        """Addresses of memory that others have too."""

    def of(self, storage: Any) -> Content:
        """What a storage contains."""
        known = self._contents.get(id(storage))
        if known is None or known.storage() is not storage:
            token = self.values.outside(storage)
            if self.outside is not None:
                self.outside.append((token, storage))
            self._contents[id(storage)] = known = Content(storage, token, False, token)
            known.is_shared = self._is_given_away(storage)
        return known

    def read(self, tensor: Tensor) -> Content:
        """What a tensor's storage contains."""
        return self.of(tensor.untyped_storage())

    def make(self, storage: Any, token: Token, *, there: bool = True) -> None:
        """An op has made a storage. `there`: whether it has computed the value, too."""
        self._contents[id(storage)] = Content(storage, token, True, token if there else None)

    def write(self, tensor: Tensor, token: Token, *, there: bool = True) -> None:
        """An op has written to a tensor's storage."""
        content = self.read(tensor)
        content.token = token
        if there:
            content.there = token

    def give_away(self, tensor: Tensor) -> None:
        """Others have the memory from now on."""
        storage = tensor.untyped_storage()
        self._given_away.append(_addresses(storage))
        content = self.of(storage)
        content.is_shared = True
        self._look(content, storage)

    def is_shared(self, storage: Any) -> bool:
        """Whether others have the memory of a storage, too."""
        return self._looks > 0 and self.of(storage).is_shared

    def _is_given_away(self, storage: Any) -> bool:
        """Whether a storage lies in memory that was given away: numpy gives it back, say."""
        if not self._given_away:
            return False
        mine = _addresses(storage)
        return any(mine.start < theirs.stop and theirs.start < mine.stop for theirs in self._given_away)

    def _look(self, content: Content, storage: Any) -> Token:
        """What is in memory that others have too. What they do with it, they do in every run alike."""
        self._looks += 1
        if content.is_constant:
            content.token = self.values.number("constant", internals.digest(storage))
        else:
            content.token = self.values.number("memory", content.token, self._looks)
        content.there = content.token
        if self.outside is not None:
            self.outside.append((content.token, storage))
        return content.token

    def overwrite(self, tensor: Tensor, token: Token) -> None:
        """Something that is not known has written to a tensor's storage."""
        self.write(tensor, token)
        if self.outside is not None:
            self.outside.append((token, tensor.untyped_storage()))

    def all(self) -> Iterator[tuple[Content, Any]]:
        """The contents of the storages that are still there, with those."""
        for content in list(self._contents.values()):
            storage = content.storage()
            if storage is not None:
                yield content, storage

    def call(self, schema: Schema, args: Any, kwargs: Any, changed: list[Tensor]) -> tuple[OpCall, list[Any]]:
        """A call of an op by what it reads, and the storages of that. `changed`: what it writes to.

        Raises `NotPlainError` where it reads a tensor whose memory does not say what it is, or writes to shared memory.
        """
        storages: list[Any] = []
        reads: list[Token] = []
        kinds: list[Any] = []
        slots = {id(t.untyped_storage()): ~i for i, t in enumerate(changed)}
        given = self._specs(args, slots, storages, reads, kinds)
        named = kwargs
        if kwargs:
            named = dict(zip(kwargs, self._specs(kwargs.values(), slots, storages, reads, kinds), strict=True))
        if schema.draws:
            self._draws += 1
            kinds.append(self._draws)
        dtype = torch.get_default_dtype()
        token = self.values.number(schema, dtype, given, *named.items(), *kinds)
        return OpCall(schema, token, given, named, reads, dtype), storages

    def _specs(
        self,
        args: Iterable[Any],
        slots: dict[int, int],
        storages: list[Any],
        reads: list[Token],
        kinds: list[Any],
    ) -> tuple[Any, ...]:
        """Arguments with a `Ref` in the place of each tensor. This is called for each op, so it calls little itself."""
        found = []
        for x in args:
            kind = type(x)
            if isinstance(x, Tensor):
                if not plain(x):
                    raise NotPlainError
                storage = x.untyped_storage()
                content = self._contents.get(id(storage))
                if content is None or content.storage() is not storage:
                    content = self.of(storage)
                token = content.token
                if content.is_shared:
                    if id(storage) in slots:
                        raise NotPlainError
                    token = self._look(content, storage)
                # Of what is not written to, it makes no difference whether a value is there once or twice.
                slot = slots.get(id(storage), token)
                storages.append(storage)
                reads.append(token)
                size, stride, offset = x.size(), x.stride(), x.storage_offset()
                x = _make_ref((token, slot, size, stride, offset, x.dtype, x.is_conj(), x.is_neg()))
            elif kind is int or kind is bool or x is None:
                kinds.append(kind)
            elif isinstance(x, (list, tuple)):
                x = self._specs(x, slots, storages, reads, kinds)
            elif isinstance(x, (float, complex)):
                kinds.append(repr(x))  # -0.0 == 0.0 == 0 == False
                if x != x:
                    x = _nans.setdefault(repr(x), x)  # each is equal to itself alone
            else:
                kinds.append(kind)
            found.append(x)
        return tuple(found)

    def constant(self, tensor: Tensor) -> None:
        """A tensor that was made of Python numbers, or lies in the memory of an array: known by what they are."""
        storage = tensor.untyped_storage()
        known = self._contents.get(id(storage))
        if type(tensor) is not Tensor or tensor.device.type != "cpu" or (known and known.storage() is storage):
            return
        self.values.set_outside(storage, self.values.number("constant", internals.digest(storage)))
        content = self.of(storage)
        content.is_constant = not content.is_shared
        content.is_shared |= not storage.resizable()


def _addresses(storage: Any) -> range:
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


# Memory that is read and written without ops.

_READ_INDICES = {torch.tensor_split, Tensor.tensor_split, torch.ctc_loss}
"""They read the memory of indices and lengths that are tensors, before they call any op."""
_READS = {Tensor.__format__, Tensor.__repr__, Tensor.tolist, Tensor.untyped_storage}
"""They read the memory of a tensor, or are asked for it by what does: pickle, `torch.save`."""


class _Calls(TorchFunctionMode):
    def __init__(self, accessed: Callable[[Tensor, bool], None]) -> None:
        super().__init__()
        self._accessed = accessed
        self.current: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in GIVES_MEMORY_AWAY or func in _READS:
            self._accessed(args[0], func in GIVES_MEMORY_AWAY)
        elif func in _READ_INDICES:
            for x in tensors(args[1:], kwargs):
                self._accessed(x, False)
        self.current = func, args, kwargs
        out = func(*args, **kwargs)
        self.current = None
        return out


class OpMode(internals.DispatchMode):
    """A mode that sees the ops, and also the calls that give away the memory of a tensor, to numpy or to a kernel."""

    is_about_functions = True

    def __init__(self, *, looks_at_calls: bool = True) -> None:
        """`looks_at_calls`: whether calls count at all."""
        super().__init__()
        self._looks_at_calls = looks_at_calls
        self._calls: _Calls | None = None

    @property
    def call(self) -> Any:
        """The torch call that is running: function, args, kwargs. None between two."""
        return None if self._calls is None else self._calls.current

    def accessed(self, tensor: Tensor, given_away: bool) -> None:
        """The memory of a tensor is read, or given away: whoever has it may read it, and write to it."""

    def __enter__(self) -> Any:
        if self._looks_at_calls:
            self._calls = _Calls(self.accessed)
            self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.__exit__(*error)


# Ops.

# They write to running_mean and running_var, which their schemas do not say.
_WRITE_STATISTICS = {
    getattr(torch.ops.aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    if hasattr(torch.ops.aten, name)
}


class Schema:
    """What is known of an op whatever it is called with.

    **Attributes:**

    - `func`: the op.
    - `is_custom`: whether it is not torch's own.
    - `draws`: whether it draws random numbers.
    - `is_view`: whether it reads nothing: its result is another look at the same memory.
    - `writes`: the arguments that it writes to, by position and name.
    - `counts_writes`: whether torch counts that under a mode.
    """

    def __init__(self, func: Any) -> None:
        returns = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        arguments = enumerate(func._schema.arguments)
        self.func = func
        self.is_custom = not internals.is_of_aten(func)
        self.counts_writes = "_foreach_" not in func._schema.name
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.is_view = (
            torch.Tag.inplace_view in func.tags  # `squeeze_` and the like write nothing
            or not all(r.is_write for r in returns)
        )
        self.writes = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self._writes_statistics = func in _WRITE_STATISTICS

    def written(self, args: Any, kwargs: Any) -> list[Any]:
        """The tensors that a call writes to (or what stands for them)."""
        if not (self.writes or self._writes_statistics):
            return []
        found: list[Any] = []
        if self._writes_statistics and args[5]:  # in training
            found += args[3:5]
        for i, name in self.writes:
            found += flat(args[i] if i < len(args) else kwargs.get(name))
        return [x for x in found if isinstance(x, (Tensor, Ref))]


_schemas: dict[int, Schema] = {}  # by identity: to hash an op takes longer than all that is asked of its schema


def schema_of(func: Any) -> Schema:
    """What is known of an op."""
    schema = _schemas.get(id(func))
    if schema is None:
        schema = _schemas[id(func)] = Schema(func)
    return schema


def flat(out: Any) -> Sequence[Any]:
    """What an op takes or returns, as a sequence."""
    return out if isinstance(out, (list, tuple)) and not isinstance(out, Ref) else (out,)


def tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments of an op."""
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [t for t in x if isinstance(t, Tensor)]
    return found


def returned(out: Any) -> list[Tensor]:
    """The tensors among what an op returned."""
    return [out] if isinstance(out, Tensor) else tensors(flat(out), None)


def refs(args: Any) -> Iterator[Ref]:
    """The tensors among the arguments of a call."""
    for x in args:
        yield from (r for r in flat(x) if isinstance(r, Ref))


_PLAIN = {Tensor, torch.nn.Parameter}


def plain(tensor: Tensor) -> bool:
    """Whether the memory of a tensor says what it is (not of a DTensor, a sparse or lazily zero one)."""
    kind = type(tensor)
    if kind not in _PLAIN and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return tensor.layout is torch.strided and not tensor._is_zerotensor()
