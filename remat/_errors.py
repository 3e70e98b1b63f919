"""Exceptions and warnings of remat."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError


class CheckpointError(_TorchCheckpointError):
    """The rerun of a function differs from its forward run.

    `except torch.utils.checkpoint.CheckpointError` catches it too.
    """


class RematError(RuntimeError):
    """A function does something that can't be run again or differentiated; the message says what to write instead."""


PURITY = (
    "A function under remat must do the same each time: it may depend on its arguments, on what it closes over and on "
    "the random state of torch, not on what other code changes in the meantime: a flag, or a hook that is added or "
    "removed. Pass what varies as an argument. If you passed an iterator, pass a list: the forward has used the "
    "iterator up."
)


_HANDED_ON = (
    "remat: in {}, {} reads a tensor of shape {}, {} that the function takes from outside and hands straight to a "
    "transform, an autograd.Function or an extension, or reads in torch.no_grad() first. No module, attribute, list, "
    "dict or global in reach holds it, so a rerun can't put another tensor in its place. Pass it as an argument."
)
_CHANGES = (
    "remat: {} changes an argument or a captured tensor of shape {}, {} in place, at {}. Its rerun would start from "
    "the changed value. Change a copy instead: x = x.clone()."
)
DATA_OF_A_LEVEL = (
    "remat: {} sets the .data of a tensor of shape {}, {} from outside to a tensor of a transform of torch.func, which "
    "torch can't read later. Write in place: self.mean.copy_(...)."
)
OUT_OF_SIGHT = (
    "remat: {} calls {}, and a torch-function mode or a class of tensors handles it out of sight, as under "
    "DisableTorchFunction(). It writes to a tensor from outside, sets a hook or draws from a generator, and a rerun "
    "would do so again. Write DisableTorchFunctionSubclass() there."
)
LAZY = (
    "remat: {} calls a lazy module that has yet to make its parameters, and a rerun would begin after that. Call it "
    "once before, in torch.no_grad()."
)

_INSTEAD = "remat.nn.remat_module, or call the function through remat.checkpoint(..., use_reentrant=False)."
SHARDED = (
    "remat: {} calls a module that fully_shard has sharded. FSDP2 takes gradients from the backward graph of that "
    f"module itself, which a rerun by remat does not have. Wrap the module with {_INSTEAD}"
)
TAKEN_APART = (
    "remat: {} takes a DTensor apart (to_local or redistribute, which the hooks of parallelize_module call), and "
    f"remat can't see the tensors inside of it. Wrap the module with {_INSTEAD}"
)
HOOKED = (
    "remat: {} puts a hook on a tensor that it has made, and {} would call it for both orders of derivatives, which a "
    "rerun can't. Use torch.func.grad in its place."
)
HOOK_OF_INPUT = (
    "remat: {} differentiates with respect to a tensor of shape {}, {} from outside, which has a hook. A rerun reads "
    "another tensor in its place, without the hook. Pass a copy, x.clone(), which has no hook, or use "
    "remat.checkpoint(..., use_reentrant=False)."
)
OTHER_GRAPH = (
    "remat: {} differentiates a tensor that was computed outside of it: it calls what torch.func.vjp or linearize has "
    "returned outside, or torch.autograd.grad. A rerun does not have that graph. Compute that tensor inside, too."
)


def shown(value: object) -> str:
    """A value as errors show it: a tensor by shape and dtype, a module by its class."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f", layout {value.layout}"
        shape = "nested" if value.is_nested else list(value.shape)
        return f"a tensor of shape {shape} and dtype {value.dtype}{layout}"
    if isinstance(value, torch.nn.Module):
        return f"a module, {type(value).__name__}"
    if isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(shown, value))}"
    return f"{type(value).__name__} {value!r}"


def function_name(fun: Any) -> str:
    """The name of a user's function, or of what is called like one; of a partial, that of its function."""
    if isinstance(fun, functools.partial):
        return function_name(fun.func)
    if isinstance(fun, types.BuiltinFunctionType):  # dynamo knows no methods of the names of others
        return fun.__qualname__.replace("_VariableFunctionsClass.", "torch.")
    return getattr(fun, "__qualname__", None) or type(fun).__qualname__


def comes_from_inside(error: Exception) -> bool:
    """Whether the function that was called has raised an error itself. If not, it can't be called like this."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def note_rerun(error: Exception, who: str) -> None:
    """Add a note to an error of the user's code or of torch that it was raised in a rerun."""
    ours = isinstance(error, (CheckpointError, RematError))
    if not ours and not getattr(error, "__notes__", None):
        error.add_note(
            f"Raised while {who} ran again for the backward pass. Its forward run went through: something that it "
            "reads has changed since, such as a cache that the forward has filled (use_cache=True), an iterator that "
            "it has used up, or a list that has grown. Or it looks up a function or a tensor by its identity: a rerun "
            "reads other tensors, and calls copies of functions that close over these."
        )


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and point at the line of the user's code that called remat. Dynamo, which knows no frames, drops it."""
    if torch.compiler.is_dynamo_compiling():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "remat":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def call_site() -> str:
    """The file:line of the running user code: the innermost frame outside torch and remat."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("torch", "remat", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def changes(name: str, tensor: Tensor, hint: str = "", where: str = "") -> RematError:
    """The error for a function that changes a differentiated tensor in place. `name`: of the function."""
    return RematError(_CHANGES.format(name, list(tensor.shape), tensor.dtype, where or call_site()) + hint)


def not_replaced(name: str, reader: str, tensor: Tensor) -> RematError:
    """The error for a tensor that a rerun can't replace. `name`, `reader`: of the function, and of the torch call."""
    return RematError(_HANDED_ON.format(name, reader, list(tensor.shape), tensor.dtype))
