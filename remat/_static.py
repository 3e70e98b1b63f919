"""`static_argnums` and `static_argnames`: whole arguments that are kept out of the tree."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from remat import _tree

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def as_tuple(option: str, what: str, given: Any, kind: type) -> tuple[Any, ...]:
    """The values of an option that takes one or several; anything else is a TypeError."""
    given = (given,) if isinstance(given, (kind, str)) else given
    try:
        values = tuple(given)
    except TypeError:
        values = (given,)
    for v in values:
        if not isinstance(v, kind) or isinstance(v, bool):
            raise TypeError(f"remat: {option} must be {what}, one or several; got {v!r}.")
    return values


class StaticArguments:
    """Which arguments of a function are static, by position and by name.

    A parameter that is static by position is static by name as well, and the other way round, so that it does not
    matter how the caller passes it.
    """

    def __init__(self, fun: Callable[..., Any], name: str, nums: Sequence[int], names: Sequence[str]) -> None:
        self._from_end: set[int] = {n for n in nums if n < 0}
        self._nums: set[int] = {n for n in nums if n >= 0}
        self._names: set[str] = set(names)
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):  # some builtins have no signature
            return
        signature = f"{name}({', '.join(str(p).split(':')[0].split('=')[0] for p in parameters)})"
        kinds = {p.kind for p in parameters}
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            for n in nums:
                _check_number(n, len(positional), signature)
            self._nums |= {n + len(positional) for n in self._from_end}
            self._from_end = set()
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            for given in names:
                _check_name(given, [p.name for p in parameters if p.kind in _NAMED], signature)
        self._names |= {p.name for i, p in enumerate(positional) if i in self._nums and p.kind in _NAMED}
        self._nums |= {i for i, p in enumerate(positional) if p.name in self._names}

    def boxed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with each static one as a single leaf."""
        nums = self._nums | {n + len(args) for n in self._from_end}
        return (
            tuple(_tree.Static(a) if i in nums else a for i, a in enumerate(args)),
            {k: _tree.Static(v) if k in self._names else v for k, v in kwargs.items()},
        )


def _check_number(n: int, count: int, signature: str) -> None:
    if not -count <= n < count:
        hint = f" Did you mean {count - 1}?" if count and n >= count else f" Did you mean {-count}?" if count else ""
        raise ValueError(f"remat: static_argnums must be in [{-count}, {count}) for {signature}; got {n}.{hint}")


def _check_name(given: str, known: list[str], signature: str) -> None:
    if given not in known:
        close = difflib.get_close_matches(given, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"remat: static_argnames must name parameters of {signature}; got {given!r}.{hint}")
