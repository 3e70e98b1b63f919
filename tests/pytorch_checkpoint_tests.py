"""Runs PyTorch's own tests of checkpointing on `torch.utils.checkpoint` and on `remat.compat`, and compares.

Usage: `python tests/pytorch_checkpoint_tests.py PYTORCH`, with a checkout of PyTorch at the version that is installed.
The tests need the package `expecttest`.
"""

import importlib
import re
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint

import remat.compat

TESTS = {"test_utils": r"TestCheckpoint\b", "test_autograd": r"checkpoint|SelectiveActivation|SACAmbient"}
"""The files, and what the names of the tests in them contain."""
DIFFERENT = {
    "test_checkpoint_valid": "autograd.grad works with use_reentrant=True",
    "test_checkpoint_valid_reset_on_error": "autograd.grad works with use_reentrant=True",
    "test_can_only_trigger_recompute_once": "two backward passes work under a selective policy",
    "test_storage_lifetime": "looks into private classes of torch",
}
"""See docs/migrating-from-torch.md."""


class Compat(types.ModuleType):
    """`remat.compat`, with torch's private names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(remat.compat if hasattr(remat.compat, name) else torch.utils.checkpoint, name)


def run(module: str, pattern: str) -> dict[str, str]:
    """Run the tests of a module whose name matches. Returns what became of each."""
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    members = vars(importlib.import_module(module)).values()
    classes = [m for m in members if isinstance(m, type) and issubclass(m, unittest.TestCase)]
    tests = [test for c in classes for test in load(c) if re.search(pattern, test.id())]
    assert tests
    result = unittest.TextTestRunner(verbosity=0, stream=sys.stderr).run(unittest.TestSuite(tests))
    outcomes = {test.id(): "passed" for test in tests}
    outcomes |= {test.id(): "skipped" for test, _ in result.skipped}
    # A failure in a `subTest` names that, not the test.
    outcomes |= {getattr(test, "test_case", test).id(): "failed" for test, _ in result.failures + result.errors}
    return {name.removeprefix(f"{module}."): outcome for name, outcome in outcomes.items()}


def main(checkout: str) -> int:
    sys.modules["compat"] = Compat("compat")
    unexpected = 0
    with tempfile.TemporaryDirectory() as folder:
        sys.path[:0] = [folder, str(Path(checkout, "test"))]
        for file, pattern in TESTS.items():
            source = Path(checkout, "test", f"{file}.py").read_text()
            source = re.sub(r"\btorch\.utils\.checkpoint(?=\.\w| import|\n)", "compat", f"import compat\n{source}")
            Path(folder, f"{file}_compat.py").write_text(source)
            theirs, ours = run(file, pattern), run(f"{file}_compat", pattern)
            for name, outcome in theirs.items():
                reason = DIFFERENT.get(name.rpartition(".")[2], "")
                unexpected += outcome == "passed" != ours[name] and not reason
                print(f"{file} {name}: torch {outcome}, remat {ours[name]} {reason and f'({reason})'}")
    print(f"{unexpected} tests pass with torch alone, for no known reason")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
