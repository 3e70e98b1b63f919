"""The public surface: a name that comes or goes has to come or go here too."""

import enum
import importlib
import inspect
from types import ModuleType

import pytest

POLICIES = {
    "CheckpointPolicy",
    "Policy",
    "all_of",
    "any_of",
    "as_policy",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "first_of",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "offload_ops",
    "recompute_ops",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_at_least",
    "save_at_most",
    "save_every",
    "save_from_both_policies",
    "save_if",
    "save_only_these_names",
    "save_ops",
}
PUBLIC = {
    "remat": {"CheckpointError", "RematError", "checkpoint_name", "remat"},
    "remat.debug": {"LiveBytes"},
    "remat.policies": POLICIES,
}
NAMES = [(module, name) for module, names in PUBLIC.items() for name in sorted(names)]


def public_names(module: ModuleType) -> set[str]:
    """`__all__`, or in a package file, which is a table of contents, all that it imports."""
    contents = [n for n, value in vars(module).items() if n[0] != "_" and not isinstance(value, ModuleType)]
    return set(getattr(module, "__all__", contents))


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module: str) -> None:
    assert public_names(importlib.import_module(module)) == PUBLIC[module]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_each_name_says_what_it_is_and_shows_it(module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    doc = inspect.getdoc(thing)
    assert doc
    known = isinstance(thing, type) and issubclass(
        thing, (Exception, enum.Enum)
    )  # torch's, or shown where it is raised
    assert known or ">>>" in doc, "show an example that runs"
