"""The public surface: a name that comes or goes has to come or go here too."""

import ast
import enum
import importlib
import importlib.metadata
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import remat

ROOT = Path(__file__).parent.parent
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
SAMPLERS = {
    "ball",
    "bernoulli",
    "beta",
    "binomial",
    "bits",
    "categorical",
    "cauchy",
    "chisquare",
    "choice",
    "dirichlet",
    "double_sided_maxwell",
    "dropout",
    "exponential",
    "f",
    "gamma",
    "generalized_normal",
    "geometric",
    "gumbel",
    "laplace",
    "loggamma",
    "logistic",
    "lognormal",
    "maxwell",
    "multinomial",
    "multivariate_normal",
    "normal",
    "orthogonal",
    "pareto",
    "permutation",
    "poisson",
    "rademacher",
    "randint",
    "rayleigh",
    "t",
    "triangular",
    "truncated_normal",
    "uniform",
    "wald",
    "weibull_min",
}
KEYS = {"PRNGKey", "clone", "fold_in", "key", "key_data", "keyed", "next_key", "split", "wrap_key_data"}
OF_TORCH = {  # nothing of ours to say about them
    "DefaultDeviceType",
    "check_backward_validity",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_device_states",
}
COMPAT = {  # `torch.utils.checkpoint.__all__` of torch 2.15
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
}
PUBLIC = {
    "remat": {
        "CheckpointError",
        "OpCost",
        "OpCosts",
        "RematError",
        "Residual",
        "checkpoint",
        "checkpoint_name",
        "checkpoint_sequential",
        "custom_remat",
        "fori_loop",
        "is_rerunning",
        "list_ops",
        "print_saved_residuals",
        "remat",
        "saved_residuals",
        "scan",
        "while_loop",
    },
    "remat.compat": COMPAT,
    "remat.debug": {"LiveBytes"},
    "remat.integrations.transformers": {"enable"},
    "remat.loops": {"fori_loop", "scan", "while_loop"},
    "remat.nn": {"RematReport", "WrappedModule", "apply_remat", "remat_module"},
    "remat.policies": POLICIES,
    "remat.random": KEYS | SAMPLERS,
}
NAMES = [(module, name) for module, names in PUBLIC.items() for name in sorted(names)]
OURS = [(module, name) for module, name in NAMES if (module, name) not in {("remat.compat", n) for n in OF_TORCH}]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module: str) -> None:
    names = importlib.import_module(module).__all__
    assert set(names) == PUBLIC[module]
    assert len(names) == len(PUBLIC[module])


@pytest.mark.parametrize("module", ["remat", "remat.policies", "remat.random", "remat.compat", "remat.loops"])
def test_a_package_file_imports_what_is_public(module: str) -> None:
    """It is a table of contents."""
    contents = vars(importlib.import_module(module)).items()
    assert {n for n, value in contents if n[0] != "_" and not isinstance(value, ModuleType)} == PUBLIC[module]


def test_a_star_imports_no_module() -> None:
    """Ours would take the place of `random`, or of `torch.nn`."""
    found: dict[str, object] = {}
    exec("from remat import *", found)
    assert not [name for name, value in found.items() if isinstance(value, ModuleType)]


def test_the_version_is_that_of_the_package() -> None:
    assert remat.__version__ == importlib.metadata.version("remat")


@pytest.mark.parametrize(("module", "name"), OURS)
def test_each_name_says_what_it_is_and_shows_it(module: str, name: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    doc = inspect.getdoc(thing)
    assert doc
    if isinstance(thing, set):
        return  # data
    known = isinstance(thing, type) and issubclass(
        thing, (Exception, enum.Enum)
    )  # torch's, or shown where it is raised
    assert known or ">>>" in doc, "show an example that runs"


def missing_sections(thing: object) -> list[str]:
    """What the docstring of a function or class should say of its signature, and does not."""
    doc = inspect.getdoc(thing) or ""
    if isinstance(thing, type):
        if issubclass(thing, (Exception, enum.Enum)):
            return []
        given = inspect.signature(thing).parameters.values()
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given):
            return []
        return [] if "**Arguments:**" in doc or "**Attributes:**" in doc else ["**Arguments:**"]
    if not inspect.isfunction(thing):
        return []
    signature = inspect.signature(thing)
    parameters = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
    missing = [f"`{name}`" for name in parameters if f"`{name}`" not in doc]
    if parameters and "**Arguments:**" not in doc:
        missing.append("**Arguments:**")
    if signature.return_annotation not in (None, "None") and "**Returns:**" not in doc:
        missing.append("**Returns:**")
    body = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    if any(isinstance(node, ast.Raise) for node in ast.walk(body)) and "**Raises:**" not in doc:
        missing.append("**Raises:**")
    return missing


@pytest.mark.parametrize(("module", "name"), OURS)
def test_each_name_says_what_it_takes_returns_and_raises(module: str, name: str) -> None:
    assert missing_sections(getattr(importlib.import_module(module), name)) == []


def test_a_missing_section_is_found() -> None:
    def documented(x: int) -> int:
        """Do nothing."""
        if x:
            raise ValueError(x)
        return x

    assert missing_sections(documented) == ["`x`", "**Arguments:**", "**Returns:**", "**Raises:**"]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_each_name_is_in_the_reference(module: str, name: str) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    thing = getattr(importlib.import_module(module), name)
    shown = re.search(rf"^::: [\w.]+\.{name}$|[\[ ]{name}[,\]]|^\| `{name}` \|", pages, re.MULTILINE)
    assert shown or isinstance(thing, set), f"give {module}.{name} a place under docs/reference"
