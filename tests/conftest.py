"""Settings of the tests: how many random programs the fuzzer tries."""

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


@pytest.fixture(params=[False, True], ids=["", "as if large"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors as they are, and treated as large ones."""
    if request.param:
        for name in ("_WORTH_A_MODE", "_WORTH_A_GRAPH"):
            monkeypatch.setattr(f"remat._unwatched.{name}", -1)
