"""The only module that touches torch's private names.

Each is behind a name of ours, with the reason for it. Tested with the torch versions in the README's table;
`tests/test_layering.py` fails if another module of the package imports a private name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as _C
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._functorch import autograd_function as _autograd_function
from torch._functorch import eager_transforms as _eager
from torch._functorch import vmap as _vmap
from torch._functorch.pyfunctorch import coerce_cinterpreter, temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch._guards import active_fake_mode as active_fake_mode
from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper
from torch._subclasses import FakeTensor as FakeTensor  # a compiler's tensor, which has no values
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad as fwad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed._composable_state import _module_state_mapping
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.traceback import preserve_node_meta

# Importing it makes every pytree node registered with torch known to optree, in the namespace "torch".
from torch.utils import _cxx_pytree as _cxx_pytree
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext as DeviceContext  # the mode behind `with torch.device(...)`
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # documented, its path is private
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts as create_selective_checkpoint_contexts

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
"""The context that does nothing, once for all."""


# Transforms.

TransformType = _C.TransformType
"""The kinds of transform that a rule can be written for."""
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
stack_depth: Callable[[], int] = _C.get_dynamic_layer_stack_depth
_RANDOMNESS = {kind: name.lower() for name, kind in _C.RandomnessType.__members__.items()}
_KINDS = {kind.value: kind for kind in TransformType.__members__.values()}


class Transform:
    """An active transform: an interpreter of `torch._functorch.pyfunctorch`, but quicker to make.

    **Attributes:**

    - `kind`: its `TransformType`.
    - `level`: its number.
    """

    __slots__ = ("_pointer", "kind", "level")

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self.kind = _KINDS[pointer.key().value]  # the member of this name: torch makes a new object for each call
        self.level: int = pointer.level()

    def lower(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which ops run one level down. Only for the innermost transform."""
        return coerce_cinterpreter(self._pointer).lower()

    def batch_size(self) -> int:
        """The batch size of a `vmap`."""
        return _C.CVmapInterpreterPtr(self._pointer).batchSize()

    def randomness(self) -> str:
        """The randomness of a `vmap`: error, different or same."""
        return _RANDOMNESS[_C.CVmapInterpreterPtr(self._pointer).randomness()]

    def reapplies_views(self) -> bool:
        """Whether a `functionalize` reapplies views."""
        return _C.CFunctionalizeInterpreterPtr(self._pointer).functionalizeAddBackViews()


def top_transform() -> Transform | None:
    """The innermost active transform, or None outside all transforms."""
    top = _C.peek_interpreter_stack()
    return None if top is None else Transform(top)


def differentiating() -> bool:
    """Whether `torch.func` differentiates at some level: a transform other than `vmap` is active."""
    return transforms_active() and any(i.key() != TransformType.Vmap for i in _C.get_interpreter_stack())


def is_under(kind: Any) -> bool:
    """Whether a transform of a `TransformType` is active at some level."""
    return transforms_active() and any(i.key() == kind for i in _C.get_interpreter_stack())


def lowest_recorded_level() -> int:
    """The level below which nothing is recorded: `torch.no_grad` is around its transform. -2 if there is no such."""
    if not transforms_active():
        return -2
    grads = (i for i in _C.get_interpreter_stack() if i.key() == TransformType.Grad)
    return max((i.level() for i in grads if not _C.CGradInterpreterPtr(i).prevGradMode()), default=-2)


def constant_for_dynamo(fun: F) -> F:
    """`torch.compiler.assume_constant_result` without the import of dynamo, which takes a second (2.13)."""
    fun._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fun


@constant_for_dynamo  # torch.compile mirrors the stack while it traces
def vmap_levels() -> tuple[tuple[int, int, str], ...]:
    """(level, batch size, randomness: error, different or same) of each active vmap, outermost first."""
    vmaps = [Transform(i) for i in _C.get_interpreter_stack() or () if i.key() == TransformType.Vmap]
    return tuple((v.level, v.batch_size(), v.randomness()) for v in vmaps)


def no_transforms() -> contextlib.AbstractContextManager[Any]:
    """A context in which ops run as if no transform were active."""
    return temporarily_clear_interpreter_stack() if transforms_active() else NOTHING


@contextlib.contextmanager
def base_level() -> Iterator[None]:
    """A context in which ops run as if no transform were active, and saved-tensor hooks work."""
    message = saved_tensors_hooks_refused()
    allow_saved_tensors_hooks()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        if message is not None:
            torch._C._autograd._saved_tensors_hooks_disable(message)


# Tensors inside of transforms: each wraps the tensor one level down.

is_wrapper: Callable[[Tensor], bool] = _C.is_functorch_wrapped_tensor
level_of: Callable[[Tensor], int] = _C.maybe_get_level  # -1: no wrapper; -2: its level is over
unwrapped: Callable[[Tensor], Tensor] = _C.get_unwrapped
is_dead: Callable[[Tensor], bool] = _C.is_dead_tensor_wrapper  # the transform that made this wrapper is over
unwrap_if_dead: Callable[[Tensor], Tensor] = _C.unwrap_if_dead
is_grad_wrapper: Callable[[Tensor], bool] = _C.is_gradtrackingtensor  # of a `grad` or `jvp`
is_legacy_batched: Callable[[Tensor], bool] = _C.is_legacy_batchedtensor
# The tensor below a level; the tensor itself if it is not wrapped at that level.
unwrap_grad: Callable[[Tensor, int], Tensor] = _C._unwrap_for_grad
# The tensor below a `vmap` level and its batch dimension (None: not batched).
unwrap_batched: Callable[[Tensor, int], tuple[Tensor, int | None]] = _C._unwrap_batched
wrap_batched: Callable[[Tensor, int, int], Tensor] = _C._add_batch_dim
wrap_functional: Callable[[Tensor, int], Tensor] = _C._wrap_functional_tensor
# The tensor below a `functionalize` level, with pending mutations applied.
unwrap_functional: Callable[..., Tensor] = _eager._maybe_unwrap_functional_tensor


def wrap_grad(tensor: Tensor, level: int) -> Tensor:
    """Wrap for a `grad` or `jvp` level, as torch lifts the inputs of an op, unless it is wrapped there."""
    return tensor if _C.maybe_get_level(tensor) == level else _C._wrap_for_grad(tensor, level)


# Levels of our own.

# A new `vmap` level, even if no argument is batched: draws can be.
vmap_level: Callable[[int, str], contextlib.AbstractContextManager[int]] = _vmap.vmap_increment_nesting


@contextlib.contextmanager
def grad_level() -> Iterator[Callable[[Tensor], Tensor]]:
    """A new `grad` level; yields `lift(tensor)`, which makes a leaf of it."""

    def lift(tensor: Tensor) -> Tensor:
        with _eager.enable_inplace_requires_grad(True):  # torch refuses `requires_grad_()` inside a transform
            return _C._wrap_for_grad(tensor, level).requires_grad_()  # type: ignore[no-any-return]

    with _eager.grad_increment_nesting() as level, torch.enable_grad():
        yield lift


@contextlib.contextmanager
def functionalize_level(reapply_views: bool) -> Iterator[int]:
    """A new `functionalize` level."""
    level = _C._func_increment_nesting(reapply_views)
    try:
        yield level
    finally:
        _C._func_decrement_nesting()


@contextlib.contextmanager
def dual_level() -> Iterator[int]:
    """A level of `torch.autograd.forward_ad`, below all levels of functorch; the user's, if that is entered."""
    with fwad._set_fwd_grad_enabled(True), NOTHING if forward_ad_active() else fwad.dual_level():
        yield 0


@contextlib.contextmanager
def jvp_level() -> Iterator[int]:
    """A new `jvp` level, also inside a `forward_ad.dual_level` that the user has entered."""
    with dual_level(), _eager.jvp_increment_nesting() as level:  # in this order: a level of jvp counts as active
        yield level


def forward_ad_active() -> bool:
    """Whether a tensor can carry a tangent now. A `jvp` in compiled code does not set the level of `forward_ad`."""
    return fwad._current_level >= 0 or is_under(TransformType.Jvp)


def forward_ad_disabled() -> contextlib.AbstractContextManager[Any]:
    """A context in which ops ignore the tangents of their inputs."""
    return fwad._set_fwd_grad_enabled(False) if forward_ad_active() else NOTHING


@contextlib.contextmanager
def without_legacy_vmap() -> Iterator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """A context outside the vmap of `autograd.grad(is_grads_batched=True)`; yields (unwrap, wrap), batch first."""
    level = torch._C._vmapmode_decrement_nesting() + 1
    try:
        yield lambda t: torch._remove_batch_dim(t, level, 1, 0), lambda t: torch._add_batch_dim(t, 0, level)
    finally:
        torch._C._vmapmode_increment_nesting()


# Modes and settings.

# How many modes are active: what sees torch calls, and what sees aten ops below all transforms.
function_modes_active: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The active modes, innermost last.
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
dispatch_mode_stack: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
push_dispatch_mode: Callable[[Any], None] = _push_mode
pop_dispatch_mode: Callable[[], Any] = _pop_mode
# The innermost torch-function mode; None without one.
top_function_mode: Callable[[], Any] = torch.overrides._get_current_function_mode
# Enter and leave a torch-function mode, without the two calls around each.
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
# Turn torch-function modes and subclasses off, or dispatch modes: they must not see our own bookkeeping.
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchDispatch = torch._C._DisableTorchDispatch
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
autocast_devices: Callable[[], list[str]] = torch._C._autocast_supported_devices


def computes_by_ops(kind: type) -> bool:
    """Whether a subclass is DTensor or a nested tensor (2.13). Others may compute with kernels that are no ops."""
    return kind.__module__.startswith(("torch.distributed.", "torch.nested."))


def is_mode_of_torch(mode: Any) -> bool:
    """Whether a dispatch mode is one of fake or functional tensors, or of proxies. These are below all others."""
    return getattr(mode, "_mode_key", None) is not None


def in_inference_mode() -> bool:
    """Whether plain autograd records nothing. `torch.is_inference_mode_enabled` says no inside a transform."""
    return not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.ADInplaceOrView)


def tracing() -> bool:
    """Whether `make_fx` records ops, as in `torch.func.linearize`. Its graph has only ops that it sees."""
    return dispatch_modes_active() > 0 and get_proxy_mode() is not None


def traced_by_jit() -> bool:
    """Whether `torch.jit.trace` records ops. It can't see those of a node in Python."""
    return torch._C._get_tracing_state() is not None


# Whether tensor subclasses handle torch calls: inside of `super().__torch_function__` they do not.
subclasses_active: Callable[[], bool] = torch._C._is_torch_function_enabled


def with_subclasses(run: Callable[[], T]) -> T:
    """Call a function, with `__torch_function__` of tensor subclasses active.

    It is not active in a backward pass that a subclass started: `super().__torch_function__` turns it off (2.13).
    """
    if subclasses_active() or torch._C._is_torch_function_all_disabled():
        return run()
    with torch._C._EnableTorchFunction():
        return run()


# Ops and trees.

OP_KINDS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload)
"""Classes of ops: of all overloads together, and of one."""
custom_function_call: Any = _autograd_function.custom_function_call
"""What `autograd.Function.apply` is under a transform."""
HigherOrderOperator: Any = torch._ops.HigherOrderOperator
# The names of all ops that the dispatcher knows, such as `aten::add.Tensor` and `aten::mm`.
op_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
negative_view: Callable[[Tensor], Tensor] = torch._neg_view  # what `z.conj().imag` is of `z.imag`
MOVES_HOOKS: Any = vars(torch._C.TensorBase)["_backward_hooks"].__set__
"""Autograd (2.13) calls it to move a view's hooks to a new node, and holds a lock that `grad_fn` takes."""


@contextlib.contextmanager
def views_resolved() -> Iterator[None]:
    """A context for a mode, in which the ops that it calls resolve conjugate and negative views.

    torch runs these ops without the dispatch keys that do so. Then kernels that make such views themselves, like that
    of `linalg.pinv`, ignore the conjugation or the sign (pytorch/pytorch#198118; seen in 2.13).
    """
    key, not_excluded = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with not_excluded(key.Conjugate, False), not_excluded(key.Negative, False):
        yield


def registered_with_torch(kind: type) -> tuple[Any, Any] | None:
    """(flatten, unflatten) of a pytree node type that torch knows and optree does not, such as dataclasses."""
    node = pytree.SUPPORTED_NODES.get(kind)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


# Nodes of autograd's graph.

AccumulateGrad: type = torch._C._functions.AccumulateGrad
"""The class of the nodes that add gradients to leaves."""
OnceDifferentiable: type = torch._C._functions.Error
"""The class of the nodes that `once_differentiable` puts behind the results of a backward. They raise (2.13)."""
LEAF_NUMBER = 1 << 62
"""Below the sequence number of AccumulateGrad nodes, above that of all others."""
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
# When an autograd node was made, counted in its thread. AccumulateGrad nodes have the highest number.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


class SingleLevelFunction(torch.autograd.function._SingleLevelFunction):
    """An autograd node for one level of functorch's stack; `autograd.Function` refuses to be used there."""

    apply: ClassVar[Callable[..., Any]]

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[Any, ...]:
        """Asked for by compiled autograd, which calls the backward of nodes with equal keys in the same way."""
        return (ctx._autograd_function_id,)


def called_directly(function: F) -> F:
    """Let the engine call the `backward` of a node of ours without torch's method that looks for it: 2 µs (2.13)."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return function


def apply_at_level(function: type[SingleLevelFunction], *args: Any) -> tuple[Tensor, ...]:
    """`function.apply` on the wrappers of the top level alone."""
    with _autograd_function.enable_single_level_autograd_function():
        return function.apply(*args)  # type: ignore[attr-defined, no-any-return]


_NODES_ARE_HELD = torch.__version__ >= (2, 13)  # type: ignore[operator]  # it compares with tuples, too
"""Whether the Python object of an autograd.Function's node keeps the node alive, like those of other nodes."""


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """`get_gradient_edge`, without a token that holds the graph, for which it would make one more node."""
    node = tensor.grad_fn
    if node is None:
        try:
            return get_gradient_edge(tensor)
        except (AssertionError, RuntimeError):  # forward-mode AD gives results without a derivative, too
            return get_gradient_edge(torch.empty_like(tensor, requires_grad=True))
    if _NODES_ARE_HELD or not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, tensor.output_nr)
    return GradientEdge(get_gradient_edge(tensor).ownership_token, 0)  # the node of a view


def metadata_of(node: Any, number: int) -> tuple[Any, torch.dtype]:
    """Shape and dtype of an output of an autograd node."""
    metadata = node._input_metadata[number]
    return tuple(metadata.shape), metadata.dtype


def bytes_made_by(node: Any) -> int:
    """The size of the results of the op that made an autograd node, in bytes."""
    return sum(math.prod(m.shape) * m.dtype.itemsize for m in node._input_metadata)


# What nodes save.

SavedTensor: Any = torch._C._autograd.SavedTensor
"""The object in which a node of the graph holds a saved tensor."""
HolderOfTorch: type = torch.utils.checkpoint._Holder
"""The placeholder for a tensor in torch's checkpoint."""
# How many use the storage with this `_cdata`: tensors, and its Python object.
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
push_saved_tensors_hooks: Callable[[Callable[[Tensor], Any], Callable[[Any], Tensor]], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks  # the context manager around it takes a third of a microsecond
)
pop_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
# Allows hooks again after `torch.func.grad`: if a graph of dynamo ends in an error, nothing else does.
allow_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._saved_tensors_hooks_enable
# Why hooks can't be used here, or None. They can't inside `torch.func.grad`, even one level down.
saved_tensors_hooks_refused: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The innermost saved-tensor hooks, (pack, unpack); or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def mutation_of_saved_allowed() -> bool:
    """Whether `torch.autograd.graph.allow_mutation_on_saved_tensors` is active: a mode, with no public name (2.13)."""
    return any(type(mode) is torch.autograd.graph._CloneArgBeforeMutateMode for mode in dispatch_mode_stack())


def hook_of_checkpoint(pack: F) -> F:
    """Mark a pack hook as not the user's: torch's selective checkpointing (2.14) warns about those."""
    pack._checkpoint_internal = True
    pack._user_hooks = None
    return pack


def saved_tensors_hooks_of_user() -> tuple[Any, Any] | None:
    """The user's hooks, also below those of checkpoints (below torch's from 2.14 on)."""
    hooks = saved_tensors_hooks()
    while hooks is not None and hasattr(hooks[0], "_checkpoint_internal"):
        hooks = getattr(getattr(hooks[0], "__self__", hooks[0]), "_user_hooks", None)
    if hooks is None or getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__:  # before 2.14
        return None
    return hooks


def save(tensor: Tensor) -> Any:
    """Save a tensor as a node of the graph does: through the hooks, or else with a check for changes in place."""
    make = getattr(torch._C._autograd, "_make_saved_tensor", None)  # new in 2.12
    return _Saved(savable(tensor)) if make is None else make(savable(tensor), is_output=False)


class _Saved:
    """A saved tensor, before torch 2.12: a node of its own saves it."""

    def __init__(self, tensor: Tensor) -> None:
        with torch.enable_grad(), DisableTorchDispatch():
            self._result = _Saver.apply(leaf_of_nothing(), tensor)

    def unpack(self) -> Tensor:
        return self._result.grad_fn.saved_tensors[0]

    @property
    def data(self) -> Any:
        return self._result.grad_fn._raw_saved_tensors[0].data


class _Saver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return leaf.clone()


def savable(tensor: Tensor) -> Tensor:
    """The tensor. Of an inference tensor, which torch can't save, a copy; no mode sees it being made."""
    with DisableTorchFunction():
        if not tensor.is_inference():
            return tensor
        with DisableTorchDispatch():
            return tensor.clone()


def sharing_versions(tensor: Tensor) -> Tensor:
    """Below autograd, another tensor over the same memory that shares its version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def as_parameter(tensor: Tensor) -> Tensor:
    """Let `isinstance(tensor, nn.Parameter)` be true. A Parameter itself can't be the wrapper of a transform (2.13)."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


def version_counter(tensor: Tensor) -> Tensor:
    """Below autograd, an empty tensor that shares the version counter: it tells of writes, and holds no memory."""
    with DisableTorchDispatch():  # the user's modes must not see this
        counter = sharing_versions(tensor)
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def leaf_of_nothing() -> Tensor:
    """An unused leaf, for hooks that must not be called. No mode sees it being made."""
    with DisableTorchDispatch():
        return torch.empty(0, requires_grad=True)


def selective_policy(forward: Any, rerun: Any) -> tuple[Any, bool] | None:
    """The policy of contexts by torch's `create_selective_checkpoint_contexts`; None for other contexts.

    With it, whether kept results may be changed in place.
    """
    if type(forward) is not _CachingTorchDispatchMode or type(rerun) is not _CachedTorchDispatchMode:
        return None  # a subclass has a policy of its own, as in xformers
    return forward.policy_fn, rerun.allow_cache_entry_mutation


# The running backward pass.

# The number of the backward pass that is running in this thread; -1 without one.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
graph_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# Whether the running backward pass is one of `.backward()` without `inputs` (2.13).
accumulates_into_all_leaves: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid
# The `GraphExecGroup` of this thread, torch's or ours; the engine hands it on to its own threads.
graph_exec_group: Callable[[], Any] = torch._C._get_graph_exec_group
set_graph_exec_group: Callable[[Any], None] = torch._C._set_graph_exec_group
# Calls back when the running backward pass is over; if it fails, the callback is dropped.
at_end_of_graph_task: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def wanted(node: Any, needed: Sequence[bool], level: int) -> Sequence[bool]:
    """Which gradients of its inputs the running backward pass asks a node for. `needed`: those that exist.

    `needs_input_grad` of an autograd.Function does not know that `autograd.grad` was asked for some of them (2.13).
    `level`: of the node. The leaves of a transform are its arguments, and it asks for all of them.
    """
    if accumulates_into_all_leaves():
        return needed
    following = [n for n, _ in node.next_functions]
    return [exists and n is not None and _is_reached(n, level) for exists, n in zip(needed, following, strict=True)]


def _is_reached(node: Any, level: int) -> bool:
    try:
        return (level and type(node) is AccumulateGrad) or torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is a leaf that was asked for (which takes 10 µs), or the compiler runs the backward pass
        return True


def run_backward(
    edges: Sequence[GradientEdge], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], keep: bool, record: bool
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(allow_unused=True)` without its checks, for cotangents that are known to fit."""
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges), tuple(cotangents), keep, record, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )


# NOTE [who asked for this derivative]
# `torch.func.grad` runs the backward pass with create_graph=True while its level is still active, although the level
# ends with it. So does a rerun. A backward that the user's function asks for (`torch.autograd.grad` inside) looks the
# same to a node, but its result can be differentiated again. They are told apart by the Python frame that called the
# engine. If it can't be found, the answer is "the user": right, though it keeps more alive.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_GRAD, _OVERRIDE = torch.autograd.grad.__code__, torch.overrides.handle_torch_function.__code__
_LAST_BACKWARD = _eager._autograd_grad.__code__
_TRANSFORM = inspect.unwrap(_eager.grad_and_value_impl).__code__
_OUR_ENGINE = run_backward.__code__


def called_by_grad_transform(thread: int) -> bool:
    """Whether the running backward pass is that of `torch.func.grad` itself, or of a rerun, whose level ends with it.

    `thread`: the thread of the forward. On accelerators the engine calls nodes from threads of its own.
    """
    frame = _engine_frame(sys._getframe(4), thread)  # above the node's own: each frame that is visited takes time
    if frame is not None and frame.f_code is _OUR_ENGINE:
        return level_of(frame.f_locals["inputs"][0]) == stack_depth()
    callers = (f.f_code for f in _frames(frame and frame.f_back))
    outer = (c for c in callers if c is not _GRAD and c is not _OVERRIDE and c.co_name != "__torch_function__")
    return next(outer, None) is _LAST_BACKWARD and next(outer, None) is _TRANSFORM


def outputs_of_running_backward(thread: int) -> Sequence[Any]:
    """The tensors and edges from which the running backward pass started; empty if it can't be found."""
    frame = _engine_frame(sys._getframe(1), thread)
    return () if frame is None else frame.f_locals["t_outputs"]


def _engine_frame(inner: types.FrameType, thread: int) -> types.FrameType | None:
    """The frame of the innermost backward pass around a frame, or else around what runs in the thread."""
    for frame in itertools.chain(_frames(inner), _frames_in(thread)):
        if (code := frame.f_code) is _ENGINE or code is _OUR_ENGINE:
            return frame
    return None


def _frames_in(thread: int) -> Iterator[types.FrameType]:
    yield from _frames(sys._current_frames().get(thread))


# Who has called.


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def called_by(package: str) -> bool:
    """Whether the innermost caller of a torch call is in `package`, not counting torch's other modules and ours."""
    for frame in _frames(sys._getframe(2)):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(package) or module.split(".")[0] not in ("torch", "remat", "contextlib"):
            return module.startswith(package)  # type: ignore[no-any-return]
    return False


_CALLS_JVP = torch.autograd.function.BackwardCFunction.apply_jvp.__code__


def inside_jvp_of_function() -> bool:
    """Whether the running code is the `jvp` of an autograd.Function that was called under remat."""
    inside = itertools.takewhile(lambda f: f.f_globals.get("__name__") != "remat._call", _frames(sys._getframe(1)))
    return any(frame.f_code is _CALLS_JVP for frame in inside)


# For torch.compile.

call_lifted: Any = dynamo_bypassing_wrapper
"""`call_lifted(wrapper, fun, *args)` is `wrapper(fun)(*args)`. Dynamo traces `fun` into a graph, with what it captures
as further arguments; `wrapper(graph)` is called when the op runs. The only way past dynamo that patches nothing."""
tree_map: Any = pytree.tree_map  # dynamo traces it
_hooks = operator.itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_regions = itertools.count()


def left_alone_by_dynamo(fun: F) -> F:
    """Mark a function that runs uncompiled, with all that it calls.

    After a graph break dynamo compiles the functions that are called next, also by autograd's engine.
    `torch.compiler.disable` would wrap the function. Marking its code costs nothing if nothing is compiled (2.13).
    """
    set_code_exec_strategy(fun.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fun


def dynamo_is_loaded() -> bool:
    """Whether something may have been given to `torch.compile`: it imports dynamo (2.13)."""
    return "torch._dynamo" in sys.modules


def may_run_compiled_code() -> bool:
    """Whether dynamo has compiled anything. Compiled code depends on the active modes (2.13)."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and getattr(dynamo, "FRAME_COUNTER", 1) > 0


def is_compiled(obj: Any) -> bool:
    """Whether `torch.compile` has made a function or a module, or `functools.wraps` has copied such a function."""
    return "_torchdynamo_orig_callable" in getattr(obj, "__dict__", {})


def uncompiled(fun: Any) -> Any:
    """`fun` as it was before `torch.compile`, also where a method or partial calls it; else `fun` itself.

    There is no public way to ask (2.13).
    """
    if isinstance(fun, types.MethodType):
        inner = uncompiled(fun.__func__)
        return fun if inner is fun.__func__ else types.MethodType(inner, fun.__self__)
    if isinstance(fun, functools.partial):
        inner = uncompiled(fun.func)
        return fun if inner is fun.func else functools.partial(inner, *fun.args, **fun.keywords)
    if isinstance(fun, torch.nn.Module):
        if is_compiled(fun) and not any(_hooks(vars(fun))):
            return uncompiled(fun._orig_mod)
        return fun if fun._compiled_call_impl is None else fun._call_impl
    return uncompiled(fun._torchdynamo_orig_callable) if is_compiled(fun) and is_of_dynamo(fun) else fun


def is_of_dynamo(obj: Any) -> bool:
    """Whether dynamo has made a function, or defines the class of an object."""
    module = obj.__globals__.get("__name__") if type(obj) is types.FunctionType else type(obj).__module__
    return str(module).startswith("torch._dynamo.")


def uncompiled_module(module: Any) -> tuple[Any, dict[str, Any]]:
    """A module before `torch.compile` or `module.compile()`, and its attributes: its own dict, or a copy."""
    plain = uncompiled(module)
    if isinstance(plain, torch.nn.Module):
        return plain, vars(plain)
    attributes = vars(plain.__self__).copy()
    del attributes["_compiled_call_impl"]
    return plain.__self__, attributes


def compiling() -> bool:
    """Whether AOTAutograd or another backend traces a graph of dynamo."""
    return dispatch_modes_active() > 0 and TracingContext.try_get() is not None


def _node_of(tensor: Tensor) -> Any:
    """The node that AOTAutograd has recorded for the value of a tensor, if it records; else None."""
    if (mode := get_proxy_mode()) is None:
        return None
    plain = torch._from_functional_tensor(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor
    slot = get_proxy_slot(plain, mode.tracer, None)
    node: Any = None if slot is None else slot.proxy.node
    while node is not None and getattr(node.target, "is_view", False):
        node = node.args[0]
    return node


def mark(tensor: Tensor, decision: Any) -> None:
    """Mark the op, with all its results, that AOTAutograd has recorded for the value of a tensor, if it has."""
    if (node := _node_of(tensor)) is not None and node.op != "placeholder":
        for marked in (node.args[0], *node.args[0].users) if node.target is operator.getitem else (node,):
            marked.meta["recompute"] = decision


def is_graph_input(tensor: Tensor) -> bool:
    """Whether AOTAutograd records, and a tensor is an input of the graph, or a view of one."""
    return getattr(_node_of(tensor), "op", None) == "placeholder"


def run_marked(graph: Any, args: Iterable[Any], policy: Any) -> Any:
    """Run a graph of dynamo while AOTAutograd records its ops, and mark these for the partitioner.

    The partitioner saves or repeats them as `policy` says. A compiled `torch.utils.checkpoint` does the same, but also
    sets saved-tensor hooks, which have nothing to do there, and which `torch.func` does not allow.
    """
    mode = create_selective_checkpoint_contexts(policy)[0]
    mode.ac_graph_id = region = next(_regions)
    for node in graph.graph.nodes:
        node.meta["ac_graph_id"] = region  # before 2.12, the mode does not pass it on
    with preserve_node_meta(), mode:
        return Interpreter(graph).run(*args)


# FSDP2 and DTensor.

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_DTENSOR = "torch.distributed.tensor"


def fully_shard_at_work() -> bool:
    """Whether one of FSDP2's hooks (2.13) makes the running torch call, not the function that has the hooks.

    The hooks own the memory of gathered parameters, and fill it anew each time.
    """
    return uses_fully_shard() and called_by(_FULLY_SHARD)


def dtensor_at_work() -> bool:
    """Whether DTensor (2.13) makes the running torch call, on the local tensors inside it."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and called_by(_DTENSOR)


def uses_fully_shard() -> bool:
    """Whether FSDP2 (2.13) has sharded a module. `replicate` and others count as well."""
    return bool(_module_state_mapping.data)  # the mapping's own length takes longer


def is_sharded(module: Any) -> bool:
    """Whether FSDP2 (2.13) has sharded this very module. `replicate` and others count as well."""
    return module in _module_state_mapping


def _groups_of_fully_shard() -> list[tuple[Any, Any]]:
    """The states of FSDP2's modules (2.13), each with its groups of parameters: before torch 2.12, it has one."""
    states = {ref() for ref in list(_module_state_mapping.values())}
    pairs = [(s, getattr(s, "_fsdp_param_groups", [getattr(s, "_fsdp_param_group", None)])) for s in states]
    return [(state, groups) for state, groups in pairs if any(groups)]


def gathered_by_fully_shard() -> set[int]:
    """By identity, the parameters that FSDP2's modules (2.13) have while their shards are gathered."""
    sharded = (p for _, groups in _groups_of_fully_shard() for group in groups for p in group.fsdp_params)
    return {id(p._unsharded_param) for p in sharded if hasattr(p, "_unsharded_param")}


def begin_forward_of_fully_shard() -> None:
    """Let FSDP2's modules (2.13) that have finished a backward begin a forward when they are called.

    Until the whole backward pass is over, they take a call for a part of their backward. Then they register none of the
    hooks that reduce gradients and free gathered parameters.
    """
    for state, groups in _groups_of_fully_shard():
        done = all(group._training_state.name == "POST_BACKWARD" for group in groups)
        if done and state._training_state.name == "PRE_BACKWARD":
            state._training_state = type(state._training_state).IDLE


def is_hook_of_fully_shard(hook: Any) -> bool:
    """Whether a hook is one of FSDP2's (2.13), which gathers parameters for a backward pass."""
    return (getattr(hook, "__module__", None) or "").startswith(_FULLY_SHARD)
