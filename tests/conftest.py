"""Settings of the tests: how many random programs the fuzzer tries."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.func import grad

from remat import _torch_internals as internals

settings.register_profile(
    "remat", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
)
settings.load_profile("remat")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-examples",
        type=int,
        default=os.environ.get("REMAT_FUZZ_EXAMPLES"),
        metavar="N",
        help="try N new random programs instead of the same 200",
    )


@pytest.fixture(scope="session")
def first_transform() -> None:
    """What torch imports then leaves cycles."""
    grad(torch.sin)(torch.ones(()))


@pytest.fixture(autouse=True)
def state_of_torch() -> Iterator[None]:
    """Each test leaves torch's global state as it was."""
    yield
    assert internals.stack_depth() == 0
    assert internals.saved_tensors_hooks_refused() is None
    assert internals.saved_tensors_hooks() is None
    assert internals.function_modes_active() == internals.dispatch_modes_active() == 0
    assert not internals.forward_ad_active()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert not internals.any_autocast_enabled()


@pytest.fixture
def no_gc(first_transform: None) -> Iterator[None]:
    """Without garbage collection: only reference counts free what a test makes. What was there before is left out."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
