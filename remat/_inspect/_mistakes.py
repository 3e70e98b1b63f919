"""The log of `REMAT_LOG=residuals`: the residuals of each call, and common mistakes."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from remat import _torch_internals as internals
from remat._call import Call
from remat._context import is_rerunning
from remat._errors import call_site
from remat._inspect._forward import is_leaf, tensors, tensors_behind
from remat._inspect._origins import Names
from remat._inspect._residuals import Held, format_residuals, total_bytes
from remat._inspect._tables import bytes_text
from remat._remat import watchers
from remat._saved import nodes_behind
from remat.policies import nothing_saveable

_log = logging.getLogger("remat")
_warned: set[str] = set()


def _make_visible() -> None:
    """Make sure that the log is shown: `REMAT_LOG` asked for it."""
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _make_visible()
        _log.warning(message)


class _Tables:
    """Logs each table once, when the backward pass reaches its calls, with the number of equal calls until then."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def add(self, title: str, table: str) -> None:
        if (title, table) not in self._logged:
            self._counts[title, table] += 1

    def log(self) -> None:
        counts, self._counts = self._counts, Counter()
        self._logged.update(counts)
        for (title, table), n in counts.items():
            _make_visible()
            _log.info(f"{title}{f' ×{n}' if n > 1 else ''}\n{table}")


_tables = _Tables()
atexit.register(_tables.log)  # calls that were never differentiated


_SMALL = 4  # values after a call are small if they take less than a quarter of the memory that the call frees

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
    """The watcher of remat's calls: warns about mistakes, and logs residuals if it has `tables`."""

    def __init__(self, warn: Callable[[str], None], tables: _Tables | None = None) -> None:
        self.warn = warn
        self._tables = tables

    def __call__(self, fun: Any, call: Call, out: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        where = call_site()
        with internals.DisableTorchFunction():
            nodes = nodes_behind((n for t in tensors(out) for n in internals.nodes_of(t)), call.since)
            saved = {id(s): s for s in (t.untyped_storage() for t in tensors_behind(nodes))}
        del nodes
        in_rerun = is_rerunning()

        def see(out: Any) -> None:
            operands = call.operands.still_there()
            if in_rerun or not operands:
                return
            with internals.DisableTorchFunction():
                raw = [t for t in map(internals.innermost, operands) if t.layout == torch.strided]
                for t in raw:
                    saved.pop(id(t.untyped_storage()), None)
                for kept in call.tape.kept.values() if call.tape is not None else ():
                    saved.pop(id(kept.memory.untyped_storage()), None)
                drops = sum(s.nbytes() for s in saved.values())
                saved.clear()
                if self._tables is not None:
                    held = Held(Names(fun, args, kwargs), None)
                    for t in raw:
                        held.add_saved(t, where)
                    held.add_kept(call)
                    keeps, dropped = bytes_text(total_bytes(held.residuals)), bytes_text(drops)
                    title = f"remat: {call.name} ({where}) keeps {keeps} and drops {dropped}, besides arguments and "
                    self._tables.add(f"{title}captured tensors", format_residuals(held.residuals))
                    for node in [n for t in tensors(out) for n in internals.nodes_of(t)][:1]:
                        node.register_prehook(lambda cotangents: _tables.log())
                if drops:
                    self._check_policy(call, where)
                    # The names of our own loops begin with "remat.": they put their steps under remat.
                    if not (call.nests or call.name.startswith("remat.")):
                        self._check_place(call.name, where, drops, out)

        return see

    def _check_policy(self, call: Call, where: str) -> None:
        if call.tape is not None and not call.tape.matched and call.policy != nothing_saveable:
            self.warn(_NOTHING.format(policy=call.policy, name=call.name, where=where))

    def _check_place(self, name: str, where: str, drops: int, out: Any) -> None:
        """When the backward pass reaches the call, compare the values after it with those that it frees."""
        pairs = [(t, n) for t in tensors(out) for n in internals.nodes_of(t)]
        if not pairs:
            return
        result, node = pairs[0]
        elements = sum(t.numel() for t, _ in pairs)
        batch = internals.innermost(result).numel() // max(result.numel(), 1)  # nodes do not know an outer vmap
        number, thread, warn = internals.sequence_number(node), threading.get_ident(), self.warn

        def check(cotangents: Any) -> None:
            nodes = [n for n in nodes_behind(internals.running_backward(thread)) if not is_leaf(n)]
            if number not in map(internals.sequence_number, nodes):
                return
            later = [n for n in nodes if internals.sequence_number(n) > number]
            after = batch * sum(map(internals.bytes_made_by, later))
            if after * _SMALL < drops:
                before = any(internals.sequence_number(n) < number for n in nodes)
                if not (before or later) and elements > 1:
                    return  # no loss, but a block by itself
                message = _LAST if before else _WHOLE
                warn(message.format(name=name, where=where, size=bytes_text(drops), after=bytes_text(after)))

        node.register_prehook(check)


logging_watch = Watched(_warn_once, _tables)
"""The watcher that logs residuals and mistakes."""

# Read once, at import: to read it at each call would cost as much as a small op.
for _wanted in filter(None, os.environ.get("REMAT_LOG", "").split(",")):
    if _wanted == "residuals":
        watchers.append(logging_watch)
    else:
        _warn_once(f"remat: REMAT_LOG can ask for 'residuals'; got {_wanted!r}.")
