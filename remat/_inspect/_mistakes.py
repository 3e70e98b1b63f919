"""The log of `REMAT_LOG=residuals`: the residuals of each call, and common mistakes."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from remat import _torch_internals as internals
from remat._call import Call
from remat._context import is_rerunning
from remat._errors import call_site
from remat._inspect._forward import tensors, tensors_behind
from remat._inspect._residuals import format_residuals, largest_views, outside_residuals, residual_of, total_bytes
from remat._inspect._tables import bytes_text
from remat._layers import innermost, nodes_of
from remat._ops import storages
from remat._remat import watchers
from remat._saved import nodes_behind
from remat.policies import nothing_saveable

_log = logging.getLogger("remat")
_logged: set[tuple[str, str]] = set()
_pending: Counter[tuple[str, str]] = Counter()
"""By title and table, the number of equal calls that no backward pass has reached yet."""


def _log_once(level: int, text: str, table: str = "", calls: int = 1) -> None:
    """Log a text and a table, if they are new."""
    if (text, table) in _logged:
        return
    _logged.add((text, table))
    if _log.level == logging.NOTSET:  # `REMAT_LOG` asked for the log, so it is shown
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
    _log.log(level, text + (f" ×{calls}" if calls > 1 else "") + (f"\n{table}" if table else ""))


@atexit.register  # for calls that were never differentiated
def _log_pending(*cotangents: Any) -> None:
    """Log the tables that are pending. Also a hook of autograd nodes."""
    counts = dict(_pending)
    _pending.clear()
    for (title, table), calls in counts.items():
        _log_once(logging.INFO, title, table, calls)


_TITLE = "remat: {name} ({where}) keeps {keeps} and drops {drops}, besides arguments and captured tensors"
_WHOLE = (
    "remat: {name} ({where}) is nearly all of the computation, and runs again right after its forward: at that moment "
    "all of its values ({size}) are in memory again. Put its parts under remat instead."
)
_LAST = (
    "remat: {name} ({where}) runs again right after its forward: the values after it are small ({after}), so dropping "
    "its own values ({size}) lowers no peak. Leave the last block without remat."
)
_NOTHING = (
    "remat: the policy {policy} matches nothing in {name} ({where}): nothing is kept. `list_ops` lists the ops, and "
    "names are given with `checkpoint_name`."
)


class Watched:
    """The watcher of remat's calls: warns about mistakes, and logs tables of residuals if it is told to."""

    def __init__(self, warn: Callable[[str], None], log_tables: bool = False) -> None:
        self._warn = warn
        self._log_tables = log_tables

    def __call__(self, fun: Any, call: Call, out: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        with internals.DisableTorchFunction():
            nodes = nodes_behind((node for t in tensors(out) for node in nodes_of(t)), call.since)
            saved = set(storages(tensors_behind(nodes)))
        return functools.partial(self._see, fun, call, args, kwargs, saved)

    def _see(self, fun: Any, call: Call, args: Any, kwargs: Any, saved: set[Any], out: Any) -> None:
        """Called when the results have the derivative of the call. `saved`: the storages that its own graph held."""
        where = call_site()
        with internals.DisableTorchFunction():
            results = [t for t in tensors(out) if nodes_of(t)]
            if is_rerunning() or not results:
                return
            operands = largest_views(map(innermost, call.operands.still_there()))
            kept = {} if call.tape is None else call.tape.held()
            drops = sum(s.nbytes() for s in saved.difference(operands, kept))
            if self._log_tables:
                residuals = outside_residuals(fun, args, kwargs, operands, {}, where)
                for storage, (value, op) in kept.items():
                    why = f"output of {op.facts.func}" if value.name is None else f"named {value.name!r}"
                    residuals.append(residual_of(value.layout.size, value.layout.dtype, storage, why, value.where))
                keeps, dropped = bytes_text(total_bytes(residuals)), bytes_text(drops)
                title = _TITLE.format(name=call.name, where=where, keeps=keeps, drops=dropped)
                _pending[title, format_residuals(residuals)] += 1
                nodes_of(results[0])[0].register_prehook(_log_pending)
        if drops:
            if call.tape is not None and not call.tape.matched and call.policy != nothing_saveable:
                self._warn(_NOTHING.format(policy=call.policy, name=call.name, where=where))
            # The names of our own loops begin with "remat.": they put their steps under remat.
            if not (call.signature.nests or call.name.startswith("remat.")):
                self._check_place(call.name, where, drops, results)

    def _check_place(self, name: str, where: str, drops: int, results: list[Tensor]) -> None:
        """When the backward pass reaches the call, compare the values after it with those that it frees."""
        elements, result, node = sum(t.numel() for t in results), results[0], nodes_of(results[0])[0]
        batch = innermost(result).numel() // max(result.numel(), 1)  # nodes do not know an outer vmap
        number, thread = internals.sequence_number(node), threading.get_ident()

        def check(cotangents: Any) -> None:
            outputs = internals.outputs_of_running_backward(thread)
            nodes = nodes_behind([n for t in outputs for n in (nodes_of(t) if isinstance(t, Tensor) else [t.node])])
            numbers = {n: internals.sequence_number(n) for n in nodes if not isinstance(n, internals.AccumulateGrad)}
            if number not in numbers.values():
                return
            later = [n for n, i in numbers.items() if i > number]
            before = any(i < number for i in numbers.values())
            after = batch * sum(map(internals.bytes_made_by, later))
            is_alone = not (before or later) and elements > 1  # a block by itself, with no loss after it
            if after * 4 < drops and not is_alone:  # less than a quarter of the memory that the call frees is small
                message = _LAST if before else _WHOLE
                self._warn(message.format(name=name, where=where, size=bytes_text(drops), after=bytes_text(after)))

        node.register_prehook(check)


_warn_once = functools.partial(_log_once, logging.WARNING)
logging_watch = Watched(_warn_once, log_tables=True)
"""The watcher that logs residuals and mistakes."""

# Read once, at import: to read it at each call would cost as much as a small op.
for _wanted in filter(None, os.environ.get("REMAT_LOG", "").split(",")):
    if _wanted == "residuals":
        watchers.append(logging_watch)
    else:
        _warn_once(f"remat: REMAT_LOG can ask for 'residuals'; got {_wanted!r}.")
