"""Who may import whom: torch's private names in one module only, and imports between modules only upwards."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import remat

ROOT = Path(remat.__file__).parent

# Each module imports only from rows above its own: those in one row do not know each other. A folder
# counts as one module.
LAYERS = [
    {"_errors"},
    {"_torch_internals"},
    {"_layers"},
    {"_dispatch_mode", "_memory", "_ops", "_saved", "_signature"},
    {"_effects", "_graph", "_closure", "_holder"},
    {"_copies", "_nested_mode", "_tree", "_places", "_labels", "_sealed"},
    {"_tail"},
    {"_names"},
    {"random", "debug", "_offload"},
    {"_context", "_static"},
    {"policies"},
    {"_look", "_module", "_compile"},
    {"_values"},
    {"_tape"},
    {"_recorder", "_replay", "_operands"},
    {"_rerun_look", "_traced", "_results"},
    {"_call"},
    {"_derived"},
    {"_primitive"},
    {"_remat"},
    {"loops"},
    {"_custom", "_inspect"},
    {"compat"},
    {"nn"},
    {"integrations"},
    {"__init__"},
]
ROW = {module: row for row, modules in enumerate(LAYERS) for module in modules}


def module_of(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").parts[0]


def package_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).parent.parts)


def imported_names(tree: ast.Module, package: str) -> Iterator[tuple[str, str, int]]:
    """Each (dotted name, the name it is bound to here, line) that the imports of a module bring in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, name.asname or "", node.lineno
                if not name.asname:  # `import a.b` binds `a`
                    yield (first := name.name.split(".")[0]), first, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for name in node.names:
                yield f"{module}.{name.name}", name.asname or name.name, node.lineno


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    if parts[0] != "torch" or parts[:2] == [
        "torch",
        "ops",
    ]:  # an op's name, underscore or not, is its schema's
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def private_torch_names(source: str, package: str = "remat") -> list[str]:
    """The private names of torch that a module imports, or reaches by attributes of what it imports."""
    tree = ast.parse(source)
    found, bound = [], {}
    for dotted, name, line in imported_names(tree, package):
        bound[name] = dotted
        if is_private(dotted):
            found.append(f"line {line}: {dotted}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attributes, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                attributes.insert(0, root.attr)
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                dotted = ".".join([bound[root.id], *attributes])
                if is_private(dotted):
                    found.append(f"line {node.lineno}: {dotted}")
    return found


def modules_imported(source: str, package: str) -> set[str]:
    """The modules of remat that a module imports."""
    names = (dotted.split(".") for dotted, _, _ in imported_names(ast.parse(source), package))
    parts = [name[1] for name in names if name[0] == "remat" and len(name) > 1]
    return {part for part in parts if (ROOT / part).is_dir() or (ROOT / f"{part}.py").exists()}


FILES = sorted(ROOT.rglob("*.py"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))


@each_file
def test_private_names_of_torch_are_in_one_module(file: Path) -> None:
    if file.name != "_torch_internals.py":
        assert private_torch_names(file.read_text(), package_of(file)) == [], "move these to remat/_torch_internals.py"


@each_file
def test_imports_point_upwards(file: Path) -> None:
    module = module_of(file)
    assert module in ROW, f"give {module!r} a row in LAYERS"
    imported = modules_imported(file.read_text(), package_of(file)) - {module}
    below = {m for m in imported if ROW.get(m, -1) >= ROW[module]}
    assert below == set(), f"{module} may import only from the rows above its own"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._ops",
        "import torch._ops as ops",
        "from torch import _C",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.autograd.function import _SingleLevelFunction as S",
        "import torch\ndef f(): return torch._C._functorch",
        "import torch.nn as nn\nnn.modules.module._global_forward_hooks",
        "from torch.autograd import forward_ad as fwad\nfwad._set_fwd_grad_enabled",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert private_torch_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.Tensor.__add__",
        "from torch.utils.checkpoint import checkpoint as _checkpoint",
        "import torch\ntorch.ops.aten._softmax.default",
        "from remat._torch_internals import TorchDispatchMode",
        "import torch.nn\ntorch.nn.functional.relu",
    ],
)
def test_a_public_name_is_not(source: str) -> None:
    assert private_torch_names(source) == []


def test_import_of_remat_imports_no_compiler() -> None:
    """Dynamo alone takes longer to import than all the rest of torch."""
    code = "import sys, remat; print(*sorted({'torch._dynamo', 'torch._inductor', 'sympy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
