"""Modules wrapped in place: their `forward` calls `checkpoint`, so they run again in the backward pass."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from remat._errors import comes_from_inside, shown
from remat._module import check, wrap
from remat.compat import checkpoint, create_selective_checkpoint_contexts
from remat.policies import Policy, as_policy
from remat.policies._policy import PolicyLike

__all__ = ["RematReport", "WrappedModule", "apply_remat", "remat_module"]

M = TypeVar("M", bound=nn.Module)
Select = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[str, nn.Module], bool]


def checkpoint_with(policy: PolicyLike) -> Callable[..., Any]:
    """Return `checkpoint` with the options for modules and a policy: `checkpoint_with(policy)(function, *args)`."""
    if policy is None:
        return functools.partial(checkpoint, use_reentrant=False)
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        as_policy(policy),
        allow_cache_entry_mutation=True,  # dropout writes to its own results
    )
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts, respect_saved_tensors_hooks=False)


@dataclass(frozen=True)
class _Checkpointed:
    """Makes the `forward` of a class call `checkpoint`."""

    policy: Policy | None

    def __call__(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that replaces `forward`."""
        run = checkpoint_with(self.policy)

        @functools.wraps(forward)
        def again(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run(functools.partial(forward, self, **kwargs), *args)  # dynamo can't trace a new method

        return again


def remat_module(module: M, *, policy: PolicyLike = None) -> M:
    """Wrap a module in place: it runs again in the backward pass instead of keeping its intermediate results.

    Its `forward` calls `remat.checkpoint`, so it works under plain autograd and under every transform of `torch.func`.
    Nothing else changes: `state_dict`, `named_parameters`, `isinstance`, hooks, `train()` and `eval()`,
    `copy.deepcopy`, `pickle`. The module's own hooks run once. Hooks of modules inside it run again with these modules.

    **Arguments:**

    - `module`: the module. If it is wrapped already, it gets the new policy.
    - `policy`: which results of ops are kept instead of recomputed, as for `remat`; None keeps nothing.

    **Returns:** the module.

    **Raises:** `TypeError` if `module` is not a module, is a `ScriptModule`, or has no `forward` (`nn.ModuleList`);
    `ValueError` if `forward` has been replaced in the instance, as by `torch.compile`, or if the module is lazy.

    **Source:** `torch.distributed.algorithms._checkpoint.checkpoint_wrapper`, which changes the names of parameters.

    Examples:
        >>> import torch
        >>> from remat.nn import remat_module
        >>> block = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU())
        >>> block = remat_module(block)
        >>> block(torch.ones(2, 3)).sum().backward()
        >>> list(block.state_dict())
        ['0.weight', '0.bias']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"remat_module: module must be an nn.Module; got {shown(module)}.")
    check(module, "remat_module", f"this {type(module).__name__}")
    wrap(module, _Checkpointed(None if policy is None else as_policy(policy)))
    return module


# Many modules.


@dataclass(frozen=True)
class WrappedModule:
    """A module that `apply_remat` has wrapped.

    **Attributes:**

    - `name`: its name in the model, as in `named_modules`.
    - `kind`: the name of its class.
    - `parameters`: the number of elements of all its parameters.

    Examples:
        >>> from remat.nn import WrappedModule
        >>> WrappedModule("layers.0", "Block", 12).name
        'layers.0'
    """

    name: str
    kind: str
    parameters: int


@dataclass(frozen=True)
class RematReport:
    """A report of `apply_remat`, to be printed.

    **Attributes:**

    - `wrapped`: the modules that were wrapped.
    - `left`: the names of modules that were selected, but skipped because of `every`.
    - `policy`: the policy of the wrapped modules, or None.

    Examples:
        >>> from remat.nn import RematReport, WrappedModule
        >>> wrapped = WrappedModule("layers.0", "Block", 12)
        >>> print(RematReport((wrapped,), ("layers.1",), None))
        remat: wrapped 1 of 2 selected modules, policy None
          layers.0  Block  12 parameters
    """

    wrapped: tuple[WrappedModule, ...]
    left: tuple[str, ...]
    policy: Policy | None

    def __str__(self) -> str:
        count = len(self.wrapped)
        lines = [f"remat: wrapped {count} of {count + len(self.left)} selected modules, policy {self.policy}"]
        names, kinds = (max(map(len, column)) for column in zip(*((m.name, m.kind) for m in self.wrapped), strict=True))
        lines += [f"  {m.name:{names}}  {m.kind:{kinds}}  {m.parameters:,} parameters" for m in self.wrapped]
        return "\n".join(lines)


def _selector(select: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(select, str):
        pattern = select.split(".")
        return lambda name, module: (
            len(parts := name.split(".")) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))
        )
    if isinstance(select, nn.Module):
        kind = type(select).__name__
        raise TypeError(
            f"apply_remat: select got a module, a {kind}. Write remat_module(module) for this one alone, and "
            f"apply_remat(model, {kind}) for all of its class."
        )
    if isinstance(select, (type, tuple)):
        for kind in select if isinstance(select, tuple) else (select,):
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise TypeError(f"apply_remat: select must name classes of modules; got {kind!r}.")
        return lambda name, module: isinstance(module, select)
    if callable(select):
        return functools.partial(_ask, select)
    raise TypeError(
        "apply_remat: select must be a class, a tuple of classes, a pattern of names or a function "
        f"(name, module) -> bool; got {shown(select)}."
    )


def _ask(select: Callable[[str, nn.Module], bool], name: str, module: nn.Module) -> bool:
    try:
        return select(name, module)
    except TypeError as error:
        if comes_from_inside(error):
            raise
        raise TypeError(f"apply_remat: {_shown(select)} can't be called as select(name, module).") from error


def apply_remat(model: nn.Module, select: Select, *, policy: PolicyLike = None, every: int = 1) -> RematReport:
    """Wrap modules of a model in place, as `remat_module` does.

    The model itself is not wrapped. If a selected module is part of another selected one, both are wrapped: the inner
    module runs again in the rerun of the outer one, and once more for its own backward.

    **Arguments:**

    - `model`: the model.
    - `select`: which modules to wrap: a class or a tuple of classes; a pattern of names, in which `*`, `?` and `[...]`
        match within one part between dots (`"layers.*"` matches `layers.0`, but not `layers.0.norm`); or a function of
        name and module that returns a bool.
    - `policy`: the results that the modules keep, as for `remat_module`.
    - `every`: wrap the first selected module and each `every`-th after it, to trade memory for time.

    **Returns:** a `RematReport`, which lists the wrapped modules.

    **Raises:** `ValueError` if nothing is selected; `TypeError` if `model` is not a module or `select` can't be called
    with a name and a module; `TypeError` and `ValueError` for a module that can't be wrapped, as `remat_module` does.
    Then no module is wrapped.

    Examples:
        >>> import torch
        >>> from remat.nn import apply_remat
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4)
        >>> print(apply_remat(model, "layers.*", every=2))
        remat: wrapped 2 of 4 selected modules, policy None
          layers.0  TransformerEncoderLayer  600 parameters
          layers.2  TransformerEncoderLayer  600 parameters
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"apply_remat: every must be a positive number; got {every!r}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply_remat: model must be an nn.Module; got {shown(model)}.")
    selected = _selector(select)
    policy = None if policy is None else as_policy(policy)
    modules = [(name, module) for name, module in model.named_modules() if name]
    chosen = [(name, module) for name, module in modules if selected(name, module)]
    if not chosen:
        hint = _hint(select, model, modules)
        raise ValueError(f"apply_remat: {_shown(select)} selects none of {len(modules)} modules.{hint}")
    wrapped = chosen[::every]
    for name, module in wrapped:
        check(module, "apply_remat", f"{name}, a {type(module).__name__},")
    for _, module in wrapped:
        wrap(module, _Checkpointed(policy))
    return RematReport(
        tuple(WrappedModule(name, type(m).__name__, sum(p.numel() for p in m.parameters())) for name, m in wrapped),
        tuple(name for i, (name, _) in enumerate(chosen) if i % every),
        policy,
    )


def _shown(select: Any) -> str:
    kinds = select if isinstance(select, tuple) else (select,)
    return ", ".join(getattr(kind, "__name__", repr(kind)) for kind in kinds)


def _hint(select: Any, model: nn.Module, modules: list[tuple[str, nn.Module]]) -> str:
    """A hint for the user who selected nothing."""
    if not modules or (isinstance(select, (type, tuple)) and isinstance(model, select)):
        return " apply_remat never wraps the model itself: write remat_module(model)."
    if isinstance(select, str):
        if select in {type(module).__name__ for _, module in modules}:
            return f" It is the name of a class: pass the class itself, as in apply_remat(model, {select})."
        [close] = difflib.get_close_matches(select, [name for name, _ in modules], n=1, cutoff=0)
        return f" Did you mean {close!r}?"
    kinds = sorted({type(module).__name__ for _, module in modules})
    return f" Their classes are {', '.join(kinds)}."
