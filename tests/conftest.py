"""Settings of the tests: how many random programs the fuzzer tries."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

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
        help="try N new random programs instead of the same 300",
    )


def pytest_collection_finish() -> None:
    """What is there before the first test lives to the end: no collection need look at it."""
    gc.collect()
    gc.freeze()
