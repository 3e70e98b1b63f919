"""The same numbers as jax.random: against recorded ones, and against jax itself where it is installed."""

import base64
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import remat.random

GOLDEN = Path(__file__).parent / "golden"
CASES = runpy.run_path(str(GOLDEN / "jax_random_cases.py"))
RECORDED = json.loads((GOLDEN / "jax_random.json").read_text())

# Relative to the numbers: several roundings of each transcendental function.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-12}


def ours(call: str) -> Tensor:
    scope: dict[str, Any] = {name: getattr(torch, name) for name in CASES["DTYPES"]}
    scope |= vars(remat.random)
    scope |= {"key": remat.random.key(7), "ints": torch.tensor}
    scope["array"] = lambda values: torch.tensor(values, dtype=torch.float32)
    return eval(call, scope)  # type: ignore[no-any-return]


def check(call: str, dtype: str, shape: list[int], data: bytes) -> None:
    out = ours(call)
    expected = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
    indices = out.dtype == torch.int64 and expected.dtype == torch.int32  # what torch takes for an index
    assert out.dtype == expected.dtype or indices
    assert out.shape == expected.shape
    if call in CASES["EXACT"] or not (out.is_floating_point() or out.is_complex()):
        assert out.tolist() == expected.tolist()
    else:
        rtol = TOLERANCE[out.dtype.to_real()]
        torch.testing.assert_close(out, expected, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("call", CASES["EXACT"] + CASES["CLOSE"])
def test_recorded(call: str) -> None:
    dtype, shape, data = RECORDED[call]
    check(call, dtype, shape, base64.b64decode(data))


@pytest.mark.parametrize("call", CASES["EXACT"] + CASES["CLOSE"])
def test_live(call: str) -> None:
    pytest.importorskip("jax")
    out = runpy.run_path(str(GOLDEN / "make_jax_random.py"))["in_jax"](call)
    check(call, str(out.dtype), list(out.shape), out.tobytes())


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, -(2**33) - 1, 2**63 - 1, -(2**63)])
def test_live_seeds(seed: int) -> None:
    jax = pytest.importorskip("jax")
    assert remat.random.key(seed).tolist() == jax.random.key_data(jax.random.key(seed)).tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 65536, 65537, 1_000_003])
def test_live_lengths(n: int) -> None:
    jax = pytest.importorskip("jax")
    expected = torch.frombuffer(bytearray(jax.random.bits(jax.random.key(3), (n,)).tobytes()), dtype=torch.uint32)
    assert torch.equal(remat.random.bits(remat.random.key(3), n), expected)
