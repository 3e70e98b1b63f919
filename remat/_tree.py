"""Pytrees by optree, with the node types that are registered with torch; None is a leaf, as in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
from optree import PyTreeSpec as PyTreeSpec

from remat import _torch_internals as internals  # makes torch's node types known to optree
from remat._errors import RematError

_PLAIN = {int, float, bool, str, type(None)}
_FLAT = _PLAIN | {torch.Tensor, torch.nn.Parameter}
_COMMON = _FLAT | {list, tuple, dict}
_NOT_REBUILT = (
    "remat: an argument or a result is a {}. To put other tensors in it, remat makes a new one of what it holds, and "
    "its constructor changes that, or it has attributes that the new one would lose. Use a named tuple or a dataclass "
    "without such a constructor."
)
_, _LEAF = optree.tree_flatten(0, none_is_leaf=True, namespace="torch")  # type: ignore[arg-type]


def _is_leaf(node: Any) -> bool:
    """Whether a node is not taken apart. Raises `RematError` for one that can't be put together again."""
    kind = type(node)
    if kind in _COMMON:
        return False
    if (hasattr(kind, "_fields") or hasattr(kind, "__post_init__")) and not _can_be_rebuilt(node):
        raise RematError(_NOT_REBUILT.format(kind.__name__))
    return kind is torch.Size  # torch would flatten it, and rebuild a plain tuple


def _can_be_rebuilt(node: Any) -> bool:
    """Whether a new node that is made of the leaves of this one has the same leaves, and loses no attributes."""
    leaves, spec = optree.tree_flatten(node, none_is_leaf=True, namespace="torch")
    if spec == _LEAF:
        return True
    try:
        new = optree.tree_unflatten(spec, leaves)
    except Exception:
        return False
    again = optree.tree_leaves(new, none_is_leaf=True, namespace="torch")
    same = [
        a is b or (type(a) in _PLAIN and type(a) is type(b) and a == b) for a, b in zip(again, leaves, strict=False)
    ]
    return all(same) and len(again) == len(leaves) and not (isinstance(node, tuple) and getattr(node, "__dict__", {}))


def flatten(tree: Any) -> tuple[list[Any], PyTreeSpec]:
    """The leaves of `tree` and its structure."""
    if type(tree) is torch.Tensor:
        return [tree], _LEAF
    leaves, spec = optree.tree_flatten(tree, is_leaf=_is_leaf, none_is_leaf=True, namespace="torch")
    adopted = [_adopted(kind) for kind in {*map(type, leaves)} - {torch.Size}]
    return flatten(tree) if any(adopted) else (leaves, spec)


def _adopted(kind: type) -> bool:
    """Register a type with optree if only torch's own pytrees know it. Returns whether they do."""
    functions = internals.registered_with_torch(kind)
    if functions is None:
        return False
    to_children, from_children = functions
    optree.register_pytree_node(
        kind, to_children, lambda context, children: from_children(list(children), context), namespace="torch"
    )
    return True


def unflatten(spec: PyTreeSpec, leaves: list[Any]) -> Any:
    """The inverse of `flatten`."""
    return leaves[0] if spec is _LEAF else optree.tree_unflatten(spec, leaves)  # dynamo does not know that spec


class Picked:
    """The distinct tensors among the leaves of a tree that pass a test, to put others in their places.

    **Attributes:**

    - `leaves`: all leaves of the tree.
    - `spec`: the structure of the tree.
    - `positions`: for each picked tensor, the position of the first leaf that is it.
    - `tensors`: the picked tensors.
    """

    def __init__(self, tree: Any, test: Callable[[torch.Tensor], bool]) -> None:
        self.leaves, self.spec = flatten(tree)
        self.positions: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, list[int]] = {}
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) in self._places:
                    self._places[id(leaf)].append(i)
                elif test(leaf):
                    self._places[id(leaf)] = [i]
                    self.positions.append(i)
                    self.tensors.append(leaf)

    def replaced(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The tree with `tensors` in place of the picked ones."""
        for tensor, places in zip(tensors, self._places.values(), strict=True):
            for i in places:
                self.leaves[i] = tensor
        return unflatten(self.spec, self.leaves)


class Static:
    """Wraps a static argument, so that it is one leaf, whatever it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], PyTreeSpec | None]:
    """The leaves of a call's arguments, and their structure: None if the leaves are the arguments themselves."""
    if not kwargs and _FLAT.issuperset(map(type, args)):
        return list(args), None
    return flatten((args, kwargs))


def unflatten_call(spec: PyTreeSpec | None, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `flatten_call`, with static arguments as they were given."""
    if spec is None:
        return tuple(leaves), {}
    args, kwargs = unflatten(spec, leaves)
    return (
        tuple(a.value if isinstance(a, Static) else a for a in args),
        {k: v.value if isinstance(v, Static) else v for k, v in kwargs.items()},
    )


def attributes_of(obj: Any) -> list[Any]:
    """The values of an object's attributes, in its dict or its slots."""
    slots = [name for kind in type(obj).__mro__ for name in vars(kind).get("__slots__", ())]
    return [*getattr(obj, "__dict__", {}).values(), *(getattr(obj, name, None) for name in slots)]
