"""Modules whose `forward` runs again in the backward pass.

Wrapping changes only the class of the module, to a subclass made on the fly with another `forward`. The module keeps
its parameters, buffers, hooks and attributes, and is still an instance of its class. A copy of its `__dict__`, as
`DataParallel` makes one, runs again too. The module's own hooks are not part of the rerun, so FSDP2's hooks gather the
parameters once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from remat import _torch_internals as internals

M = TypeVar("M", bound=nn.Module)
How = Callable[[Any], Any]
"""Takes a `forward` and returns one that runs again. It must support == and pickle."""


class _Quiet:
    """A first base while a class is made, so that the user's `__init_subclass__`, of a registry say, is not called."""

    def __init_subclass__(cls) -> None:
        """Do nothing."""


def _tells_of_subclasses(base: type) -> bool:
    """Whether a class has an `__init_subclass__` of the user's."""
    return any("__init_subclass__" in vars(kind) for kind in base.__mro__ if kind not in (object, Generic))


def _is_made_here(kind: type) -> bool:
    return "_remat_how" in vars(kind)


def _class_of(base: type[nn.Module], how: How) -> type[nn.Module]:
    """The subclass of `base` whose `forward` runs again, cached in `base.__subclasses__()`."""
    for known in base.__subclasses__():
        if _is_made_here(known) and vars(known)["_remat_how"] == how:
            return known

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        # Another process can't find this class by its name, so it makes an instance of `base` and wraps that.
        reduced: Any = base.__reduce_ex__(self, protocol)
        make, args, *state = reduced
        return _rebuild, (how, make, *(base if a is made else a for a in args)), *state

    namespace = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": reduce_ex,
        "_remat_how": how,
        "forward": how(base.forward),
    }
    made = type(base.__name__, (_Quiet, base) if _tells_of_subclasses(base) else (base,), namespace)
    made.__bases__ = (base,)  # Python can't take `_Quiet` out if the first base has no `__dict__`, as ABC and Generic
    return made


def _rebuild(how: How, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    module = make(*args)
    wrap(module, how)
    return module


def check(module: nn.Module, who: str, what: str) -> None:
    """Raise unless a module can be wrapped. The error names the public function `who` and the module `what`."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{who}: {what} is a ScriptModule, whose forward is not Python code: wrap it before that.")
    if internals.is_compiled(module):
        raise TypeError(f"{who}: {what} is a compiled module: wrap the module before torch.compile.")
    if kind.forward is nn.Module.forward:
        raise TypeError(f"{who}: {what} has no forward: wrap the modules in it.")
    if "forward" in vars(module):
        raise ValueError(
            f"{who}: {what} has a forward of its own, besides that of its class: torch.compile or a library has put it "
            "there. Wrap the module before that, or call it in a function: remat(lambda x: module(x))."
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(f"{who}: {what} is lazy and will change its class. Run it once before you wrap it.")
    if not _is_made_here(kind) and any(map(_is_made_here, kind.__mro__)):
        raise ValueError(
            f"{who}: {what} is wrapped already, and fully_shard or a parametrization has changed its class since: its "
            "policy can't be changed."
        )


def wrap(module: nn.Module, how: How) -> None:
    """Give a module the class that runs again. If it is wrapped already, the new class replaces the old one."""
    kind = type(module)
    module.__class__ = _class_of(kind.__mro__[1] if _is_made_here(kind) else kind, how)


def wrapped_twin(module: M, how: How) -> M:
    """A module that runs again and shares the `__dict__` of `module`: an attribute set on one is set on both."""
    module, attributes = internals.uncompiled_module(module)  # remat has to see the ops
    name = type(module).__name__
    check(module, "remat", f"this {name}")
    if internals.is_sharded(module):
        raise ValueError(
            f"remat: fully_shard has sharded this {name}, and would not know its twin. Write remat_module(module), "
            "which changes the module itself, or remat(module) before fully_shard."
        )
    if isinstance(object.__getstate__(module), tuple):  # it has attributes besides its `__dict__`
        raise ValueError(
            f"remat: {name} has attributes in __slots__, which a twin can't share. Write remat_module(module), which "
            "changes the module itself, or remat(lambda x: module(x))."
        )
    twin = object.__new__(type(module))  # `__new__` of a GraphModule makes another class
    twin.__dict__ = attributes
    wrap(twin, how)
    return twin
