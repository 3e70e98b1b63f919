"""Calls of functions that need not be watched, because their code shows what they do. See `remat._pure`.

What such a function depends on is known before it runs: its arguments, the tensors in its cells and globals and those
of the modules that it uses. Under plain autograd the call keeps its native graph, without what that would save; so do
calls with large tensors under a lone `grad`, which run below it, and those of functions that call others under remat. A
backward pass over such a graph runs the function again. Under
other transforms a node takes the place of the graph, and reruns need not compute the last product of large tensors.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _pure, _tree
from remat import _torch_internals as internals
from remat._context import Ambient, RandomState, replayed
from remat._derived import Derived
from remat._errors import CheckpointError, RematError, note_rerun
from remat._frozen import Freezer, Table, Thawer, cell_contents
from remat._nesting import is_inside, under
from remat._primitive import attach, attach_over_graph, attach_over_graph_below
from remat._run import CHANGES
from remat._sparse_graph import SparseGraph
from remat._stand_ins import Swapped, filled
from remat._tail import LastProduct, Search, Spared, Sparing
from remat._watch import active_watches
from remat.random._keyed import suspended

_WORTH_A_MODE = 2**12  # elements: to look for the last product, with a mode, takes as long as a small one
_WORTH_A_GRAPH = 2**15  # elements: what a graph that saves nothing does in Python takes as long as a few ops on them
_TENSORS = {Tensor, torch.nn.Parameter}
_LEAVES = _TENSORS | {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size}
_NAMES = {str, int, float, bool, type(None)}
_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")
_Context = contextlib.AbstractContextManager[Any]
_NOTHING: _Context = contextlib.nullcontext()
_REPLACED = (
    "remat: a module or a function that {} uses was replaced, or given a hook, between its forward run and the "
    "backward, where it runs again. Pass what varies as an argument, and register hooks before the forward."
)
_COUNTED = (
    "remat: a BatchNorm that {} calls in eval mode ran in training mode between its forward run and the backward, "
    "where it runs again and would read other statistics. Do the backward first, or call a copy of the module."
)


def _is_plain(tree: Any) -> bool:
    """Whether there is nothing in it that has code of its own."""
    kind = type(tree)
    if kind in _LEAVES:
        return True
    if kind is dict:
        return _NAMES.issuperset(map(type, tree)) and all(map(_is_plain, tree.values()))
    return (kind is tuple or kind is list) and all(map(_is_plain, tree))


def _tells(tree: Any) -> bool:
    """Whether there is a key in it that tells an operation to write to something."""
    if type(tree) is dict:
        return "out" in tree or "inplace" in tree or _tells(tuple(tree.values()))
    return (type(tree) is tuple or type(tree) is list) and any(map(_tells, tree))


class PlainCall:
    """A call of which nothing is differentiated."""

    def run(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *options: Any) -> Any:
        """The result."""
        return fun(*args, **kwargs)

    def record(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
        """The result."""
        return fun(*args, **kwargs)


_PLAIN_CALL = PlainCall()


class UnwatchedCall:
    """One call of a function, ready to be repeated: `call(*operands)` gives its results.

    **Attributes:**

    - `operands`: until the function runs, the tensors that it is given and finds, each once.
    - `versions`: how often each had been written to.
    - `random`: the draws to repeat.
    - `tape`: None: calls with a policy are not among these.
    - `needs_node`: whether a node has to take the place of the native graph from the start.
    """

    last_rerun = False
    level: int | None = None
    needs_node = False
    hooked: frozenset[int] = frozenset()
    versions: list[int]
    returned: list[int]
    random: RandomState | None = None
    tape = None
    _roots: list[Any] | None
    _under_transforms = False
    _random_before: RandomState | None = None
    _as_checkpoint = False
    _context = _NOTHING
    _last: LastProduct | None = None
    _table: Table | None = None
    _written: Sequence[_pure.Value] = ()
    _counters: Sequence[tuple[Tensor, int]] = ()

    def __init__(
        self,
        name: str,
        fun: Any,
        reads: _pure.Reads,
        roots: list[Any],
        leaves: list[Any],
        spec: _tree.PyTreeSpec | None,
        contents: dict[int, tuple[types.CellType, Any]],
        places: list[_pure.Value],
        tensors: list[Tensor],
    ) -> None:
        """What a function is given and finds.

        **Arguments:**

        - `reads`: what is known of the function.
        - `roots`: the function, and functions and modules in its cells.
        - `leaves`, `spec`: of the arguments; `spec` is None where the leaves are the arguments.
        - `contents`: of the function's cells.
        - `places`: where modules and globals hold what it reads.
        - `tensors`: all of them.
        """
        self.name = name
        distinct = {id(t): t for t in tensors}
        self.operands = [*distinct.values()]
        position = {key: i for i, key in enumerate(distinct)}
        self._arguments: list[tuple[int, int]] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._arguments.append((i, position[id(leaf)]))
                leaves[i] = None
        self._leaves, self._spec = leaves, spec
        self._values = _pure.values(reads, roots)
        self._places = [(names, key, position[id(t)], weakref.ref(t)) for names, key, t in places if t is not None]
        self._values += [value for value in places if value[2] is None]
        self._reads = reads
        self._repeats_draws = reads.draws
        self._parts = [*map(_pure.made_of, roots)]
        if reads.statistics:
            self._written = _pure.written(reads)
            self._counters = [(t, t._version) for t in _pure.counters(reads)]
        self._fun, self._roots = fun, roots
        self._reruns: list[Spared] = []
        if contents:
            self._roots = None  # those of what is put together again count
            freezer = Freezer(contents, position)
            self._fun, self._table = freezer(fun), freezer.table

    @property
    def nests(self) -> bool:
        """Whether the function calls functions under remat."""
        return self._reads.nests

    @property
    def stays(self) -> frozenset[int]:
        """The positions of operands that others hold for good: what modules have."""
        return frozenset(at for _, _, at, _ in self._places)

    def record(
        self,
        fun: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        early_stop: bool,
        preserve_rng_state: bool,
        determinism_check: bool,
        contexts: tuple[_Context, _Context],
    ) -> Any:
        """The user's own call, and its result with a graph that saves nothing. It is torch's checkpoint.

        **Arguments:**

        - `early_stop`: whether the rerun may end as soon as all is there that the graph would have saved.
        - `preserve_rng_state`: whether the rerun draws what the forward draws.
        - `determinism_check`: whether to compare the metadata of what both save.
        - `contexts`: of the forward, and of each rerun.
        """
        self._be_checkpoint(preserve_rng_state)
        graph = SparseGraph(self, early_stop)
        graph.compares = determinism_check
        forward_context, self._context = contexts
        with forward_context:
            return graph.record(fun, args, kwargs)

    def record_nothing(self, fun: Any, args: tuple[Any, ...], *, preserve_rng_state: bool) -> tuple[Any, _tree.Picked]:
        """The user's own call in `no_grad`: its result, and what a node has to differentiate of it.

        That is what it returns by itself or in a tuple, but not an operand: that has a gradient of its own.
        """
        self._be_checkpoint(preserve_rng_state)
        known = {*map(id, self.operands)}
        with torch.no_grad():
            out = self.forward(fun, args, {})
        new = {id(r) for r in (out if isinstance(out, tuple) else (out,))} - known
        results = _tree.Picked(out, lambda r: id(r) in new and (r.is_floating_point() or r.is_complex()))
        self.returned = results.positions
        return out, results

    def _be_checkpoint(self, preserve_rng_state: bool) -> None:
        self._repeats_draws = self._reads.draws and preserve_rng_state
        self._as_checkpoint = True

    def run(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], preserve_rng_state: bool) -> Any:
        """The user's own call, and its result with the remat'd derivative.

        **Arguments:**

        - `preserve_rng_state`: whether the rerun draws what the forward draws.
        """
        self._repeats_draws = self._repeats_draws and preserve_rng_state
        if self.needs_node:
            return self._run_under_node(fun, args, kwargs)
        operands = self.operands
        graph = self._graph()
        out = graph.record(fun, args, kwargs)
        results = _tree.Picked(out, functools.partial(_is_computed, operands))
        if not results.tensors:
            return out
        self.returned = results.positions
        # Else it has more results, that are not under the node: operands, views, what was put into a list.
        graph.may_skip = len(results.tensors) == len(results.leaves) and (
            self._spec is None or _holds_none_but(operands, (args, kwargs))
        )
        return results.replaced(attach_over_graph(self, results.tensors, operands, graph))

    def _run_under_node(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = self.operands
        mode: Search | None = None
        size = max(map(Tensor.numel, operands), default=0)
        is_worth_it = self.nests or size > _WORTH_A_GRAPH
        level = internals.lone_grad() if is_worth_it and self._reads.may_run_below else None
        if level is not None and self._may_run_below(level):
            below = self._run_below(level)
            if below is not None:
                return below[0]
        self._under_transforms = internals.transforms_active()
        if size > _WORTH_A_MODE and not self.nests:
            mode = Search()
        out = self.forward(fun, args, kwargs, mode)
        results = _tree.Picked(out, functools.partial(_is_computed, operands))
        if isinstance(mode, Search):
            self._last = mode.found()
        values = results.tensors
        if not values:
            return out
        self.returned = results.positions
        attached = attach(Derived(self, self), values, operands)
        return out if attached is values else results.replaced(attached)

    def _graph(self) -> SparseGraph:
        """What holds nothing of the run that is about to begin."""
        return SparseGraph(self, early_stop=True, under_node=True)

    def _may_run_below(self, level: int) -> bool:
        """Whether a `grad`, the only transform, is all that differentiates the call, and it changes no list."""
        below = [internals.unwrap_grad(t, level) for t in self.operands]
        return (
            (self._spec is None or not self._reads.changes_containers)
            and torch.is_grad_enabled()
            and not internals.in_inference_mode()
            and any(map(_requires_grad, self.operands))
            and not any(map(_requires_grad, below))
            and not any(map(Tensor.is_inference, below))
            and not internals.forward_ad_active()
            and not internals.any_autocast_enabled()  # it would keep casts of the leaves for as long as it lasts
            and _TENSORS.issuperset(map(type, below))
        )

    def _run_below(self, level: int) -> tuple[Any] | None:
        """The result of the call, run below a `grad`, the only transform: there its graph need not save anything.

        None where it can't run there: it draws, which ops do in other ways there, or it fails, or what it returns is a
        view of an operand or may hold tensors out of sight. Then the generators are as they were.
        """
        operands = self.operands
        with internals.base_level(), internals.grad_enabled():
            below = [(t, internals.unwrap_grad(t, level)) for t in operands]
            self.operands = leaves = [b.detach().requires_grad_() if t.requires_grad else b for t, b in below]
            graph = self._graph()
            try:
                out = graph.record(self.again, (leaves,), {"is_rerun": False})
                results = _tree.Picked(out, lambda r: isinstance(r, Tensor)) if _is_plain(out) else None
            except RematError:  # it has written to an operand: once is enough
                raise
            except Exception:
                results = None
        lifted: dict[int, Tensor] = {id(leaf): t for leaf, t in zip(leaves, operands, strict=True)}
        if results is None or self.random is not None or not self._can_be_lifted(results, leaves):
            if (random := self.random or self._random_before) is not None:
                random.put_back()
            self.operands, self.random, self._reads.may_run_below = operands, None, False
            return None
        made = [(i, r) for i, r in zip(results.positions, results.tensors, strict=True) if id(r) not in lifted]
        values = [r for _, r in made if r.requires_grad]
        self.returned = [i for i, r in made if r.requires_grad]
        attached = attach_over_graph_below(Derived(self, self), level, values, operands, leaves)
        lifted |= {id(r): internals.wrap_grad(r, level) for _, r in made if not r.requires_grad}
        lifted |= {id(r): t for r, t in zip(values, attached, strict=True)}
        return (results.replaced([lifted[id(r)] for r in results.tensors]),)

    def _can_be_lifted(self, results: _tree.Picked, leaves: list[Tensor]) -> bool:
        """Whether a call below has returned something to differentiate, in memory of its own."""
        known = {*map(id, leaves)}
        made = [r for r in results.tensors if id(r) not in known]
        if not any(map(_requires_grad, made)):
            return False
        may_share = [r for r in made if r._is_view() or not r.requires_grad]
        return not may_share or {*map(internals.memory_of, leaves)}.isdisjoint(map(internals.memory_of, may_share))

    def forward(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Search | None = None) -> Any:
        """The user's own call: `fun` is the function before it was taken apart. `mode`: what looks on."""
        operands, self.operands = self.operands, []
        self._ambient = Ambient.current()
        self.versions = versions = [*map(_version, operands)]
        if self._repeats_draws:
            self._random_before = RandomState(operands, of_torch_alone=True)
        if mode is None:
            out = fun(*args, **kwargs)
        else:
            with mode:
                out = fun(*args, **kwargs)
        if self._random_before is not None:
            self.random, self._random_before = self._random_before.drawn_since(), None
        if [*map(_version, operands)] != versions:
            t = next(t for t, before in zip(operands, self.versions, strict=True) if t._version != before)
            raise RematError(CHANGES.format(self.name, list(t.shape), t.dtype, "a place out of sight"))
        return out

    @property
    def needs_level(self) -> bool:
        """Whether the ops of a rerun have to be those of the forward one by one, and that ran under a transform."""
        return self._under_transforms and self.random is not None

    def again(self, operands: Sequence[Tensor], *, is_rerun: bool = True) -> Any:
        """The call again, with operands in the place of the tensors that it was given and found."""
        leaves = list(self._leaves)
        for i, at in self._arguments:
            leaves[i] = operands[at]
        args, kwargs = (leaves, {}) if self._spec is None else _tree.unflatten(self._spec, leaves)
        thaw = None if self._table is None else Thawer(self._table, operands)
        fun = self._fun if thaw is None else thaw(self._fun)
        swaps: Swapped | None = None
        slots = [value for value in self._values if value[0].get(value[1]) is not value[2]]
        if self._written:
            slots += [(names, name, buffer.clone()) for names, name, buffer in self._written]
        for names, name, at, ref in self._places:
            operand, original = operands[at], ref()
            stays = names.get(name) is original
            if stays and operand is original:
                continue
            # No other thread reads what a transform of this one has put there.
            if original is None or not stays or internals.is_wrapper(original):
                slots.append((names, name, operand))
            else:
                swaps = swaps or Swapped()
                swaps.swap(original, operand)
        try:
            usual = not (slots or swaps or self.random or self._ambient.autocast) and self._context is _NOTHING
            if usual and Ambient.current() == self._ambient:
                if is_rerun:
                    self._check(fun)
                return fun(*args, **kwargs)
            ambient = self._ambient.restored(keeps_casts=self._as_checkpoint)
            with ambient, filled(slots) if slots else _NOTHING:
                if is_rerun:
                    self._check(fun)
                with self._drawing_again(), under(swaps) if swaps else _NOTHING, self._context:
                    return fun(*args, **kwargs)
        except Exception as error:
            if is_rerun:
                note_rerun(error, self.name)
            raise
        finally:
            if thaw is not None:
                thaw.empty()

    @contextlib.contextmanager
    def _drawing_again(self) -> Iterator[None]:
        """Within it, the draws are those of the forward."""
        if self.random is None:
            yield
            return
        with suspended(), replayed(self.random):
            yield

    def _check(self, fun: Any) -> None:
        """Raise where a function does not do any more what it did, or what it reads was changed out of sight."""
        roots = _pure.roots_of(fun) if self._roots is None else self._roots
        if not _pure.still(fun, roots, self._reads, self._parts, hooks_count=not self._as_checkpoint):
            raise CheckpointError(_REPLACED.format(self.name))
        if self._counters:
            with internals.DisableTorchFunction():
                if any(t._version != before for t, before in self._counters):
                    raise CheckpointError(_COUNTED.format(self.name))

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        if self._last is not None:
            with Sparing(self.name, self._last) as mode:
                self._reruns.append(mode.spared)
                result = self.again(operands)
        else:
            result = self.again(operands)
        out, _ = _tree.flatten(result)
        return [out[i] for i in self.returned]

    def settle(self) -> None:
        """Called when the results of a rerun are gone: what is left of them has to be right."""
        reruns, self._reruns = self._reruns, []
        for rerun in reruns:
            rerun.settle()

    def clean(self) -> None:
        """Called when the rerun's graph is gone."""
        self._reruns = []

    def finish(self) -> None:
        """Called when the derivative is there."""


def _holds_none_but(operands: list[Tensor], arguments: Any) -> bool:
    """Whether all tensors in the arguments are operands, and there is nothing that may hold others."""
    known = {*map(id, operands)}
    return _is_plain(arguments) and all(id(x) in known for x in _tree.flatten(arguments)[0] if isinstance(x, Tensor))


def _is_computed(operands: list[Tensor], result: Tensor) -> bool:
    """Whether a result is differentiated, and neither an operand nor a view of one."""
    if not (
        internals.requires_grad_at_any_level(result)
        or (internals.forward_ad_active() and (result.is_floating_point() or result.is_complex()))
    ):
        return False
    if result._is_view() and any(result._base is t or result._base is t._base for t in operands):
        return False
    return id(result) not in map(id, operands)


def _reads_what_it_writes(reads: _pure.Reads, tensors: list[Tensor]) -> bool:
    """Whether a function may read statistics that its modules write to."""
    written = _pure.written(reads)
    if not reads.asked.isdisjoint(name for _, name, _ in written):
        return True
    memory = {internals.memory_of(buffer) for _, _, buffer in written}
    return not memory.isdisjoint(map(internals.memory_of, tensors if memory else ()))


def unwatched(
    fun: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    sees_ops: bool = False,
    as_given: bool = False,
) -> UnwatchedCall | PlainCall | None:
    """A call of a function that need not be watched, else None.

    **Arguments:**

    - `sees_ops`: whether something looks at the ops of both runs, which have to be the same then.
    - `as_given`: whether the rerun has to be given the very same objects, not copies of lists and dicts.
    """
    # Under hooks there may be a region around that runs this again. It has to save the same then: watched both times.
    inside = False
    if internals.function_modes_active() or internals.saved_tensors_hooks_active():
        inside = is_inside()
        if not inside:
            return None
    while type(fun) is functools.partial and _LEAVES.issuperset(map(type, (*fun.args, *fun.keywords.values()))):
        args, kwargs, fun = (*fun.args, *args), {**fun.keywords, **kwargs}, fun.func
    flat = not kwargs and _LEAVES.issuperset(map(type, args))
    if not flat and args and type(fun) is types.FunctionType and isinstance(args[0], torch.nn.Module):
        args, fun = args[1:], types.MethodType(fun, args[0])  # it is a method that is decorated
        flat = not kwargs and _LEAVES.issuperset(map(type, args))
    if not flat and (as_given or not (_is_plain(args) and _is_plain(kwargs))):
        return None
    roots: list[Any] = []
    reads = _pure.reads(fun, roots)
    if reads is None or internals.tracing():
        return None
    leaves, spec = (list(args), None) if flat else _tree.flatten((args, kwargs))
    if reads.may_write and any(leaf is True for leaf in leaves):  # F.relu(x, inplace)
        return None
    if reads.unpacks and not flat and _tells((args, kwargs)):
        return None
    if reads.changes_containers and not flat and _tree.twice_in((args, kwargs)):
        return None  # the rerun is given copies
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    contents: dict[int, tuple[types.CellType, Any]] = {}
    places: list[_pure.Value] = []
    if getattr(roots[0], "__closure__", None):
        contents = cell_contents(roots[:1])
        tensors += [content for _, content in contents.values() if isinstance(content, Tensor)]
    if reads.tensors or reads.global_tensors:
        places = _pure.places(reads, roots)
        for mode in active_watches() if inside else ():  # what it finds is not what it reads
            places = [(names, key, None if t is None else mode.swapped(t)) for names, key, t in places]
        tensors += [tensor for _, _, tensor in places if tensor is not None]  # a bias that there is none of
    for tensor in tensors:
        if (given := tensor.__dict__) and not reads.asked.isdisjoint(given):
            return None  # what is asked for may be an attribute that somebody has given to a tensor
    if reads.statistics and _reads_what_it_writes(reads, tensors):
        return None
    needs_node = (
        internals.transforms_active() or internals.forward_ad_active() or internals.saved_tensors_hooks_refused()
    )
    if (reads.statistics and (needs_node or sees_ops)) or (reads.nests and sees_ops):
        return None
    if not (needs_node or any(map(_requires_grad, tensors))):
        return _PLAIN_CALL
    if (
        not _TENSORS.issuperset(map(type, tensors))
        or any(map(Tensor.is_inference, tensors))
        or any(map(internals.is_dead, tensors))
    ):
        return None
    call = UnwatchedCall(name, fun, reads, roots, leaves, spec, contents, places, tensors)
    call.needs_node = needs_node
    return call
