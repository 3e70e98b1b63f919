"""The hash, its layout in blocks, and what a draw costs."""

import pytest
import torch
from helpers import CountOps
from torch import Tensor
from torch.func import functionalize, grad, jacfwd, jacrev, jvp, vmap

from remat.debug import LiveBytes
from remat.random import _threefry, bernoulli, bits, dropout, fold_in, key, normal, split, uniform


def words(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize(
    ("k", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(k: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]) -> None:
    """Those of Random123, the library of the authors of Threefry: `kat_vectors`, threefry2x32 with 20 rounds."""
    k0, k1, c0, c1 = (words(n) for n in (*k, *counter))
    for hashed in (
        _threefry.threefry2x32(k0, k1, c0, c1, torch.empty(3, 1, dtype=torch.int32)),
        _threefry._threefry2x32_wide(k0, k1, c0, c1),  # what torch.compile gets
    ):
        assert [h.tolist() for h in hashed] == words(*expected)[:, None].tolist()


def test_few_and_many_are_hashed_alike() -> None:
    numbers = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31)] * 10)
    many = fold_in(key(-7), numbers)
    assert torch.equal(fold_in(key(-7), numbers[:5]), many[:5])
    assert torch.equal(fold_in(split(key(-7), 5), numbers[:5]), fold_in(split(key(-7), 50), numbers)[:5])


def test_counters_have_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2**32 elements the high word counts: on the meta device, where they take no memory."""
    high_words = []

    def spy(k0: Tensor, k1: Tensor, c0: int, c1: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        high_words.append(c0)
        return buffers[0], buffers[1]

    monkeypatch.setattr(_threefry, "threefry2x32", spy)
    monkeypatch.setattr(_threefry, "_block_size", lambda nbytes, device: 2**31)
    _threefry._fill(key(0, device="meta"), [2**32 + 10], torch.float32, lambda block, high, low: None)
    assert high_words == [0, 0, 1]


@pytest.mark.parametrize("n", [0, 1, 7, 2**16, 2**16 + 3, 2**19 + 1])
def test_an_element_does_not_depend_on_how_many_there_are(n: int) -> None:
    whole = uniform(key(1), 2**19 + 2**17)
    assert torch.equal(uniform(key(1), n), whole[:n])


def test_a_batch_of_keys_is_each_of_them() -> None:
    for n, batch in ((3, 5), (2**17, 3), (2**14, 9)):
        keys = split(key(2), batch)
        one_by_one = torch.stack([uniform(k, n) for k in keys])
        assert torch.equal(uniform(keys, n), one_by_one)
        assert torch.equal(vmap(lambda k, n=n: uniform(k, n))(keys), one_by_one)
    keys = split(key(2), (2, 3))
    assert torch.equal(uniform(keys, 4)[1, 2], uniform(keys[1, 2], 4))
    assert torch.equal(vmap(vmap(lambda k: uniform(k, 4)), in_dims=1)(keys), uniform(keys, 4).transpose(0, 1))
    assert uniform(split(key(0), 0).reshape(0, 2), (3,)).shape == (0, 3)


def test_every_transform_sees_one_op_without_derivative() -> None:
    def f(x: Tensor) -> Tensor:
        return x * uniform(key(0), (3,))

    x, u = torch.ones(3), uniform(key(0), (3,))
    assert torch.equal(grad(lambda x: f(x).sum())(x), u)
    assert torch.equal(jvp(f, (x,), (x,))[1], u)
    assert torch.equal(jacrev(f)(x), u.diag())
    assert torch.equal(jacfwd(f)(x), u.diag())
    assert torch.equal(functionalize(f)(x), u)
    k = key(0)
    with CountOps() as ops:
        uniform(k, (3,))
    assert ops.counts == {"threefry_uniform": 1}


@pytest.mark.parametrize(
    ("draw", "nbytes"),
    [
        (lambda k, n: uniform(k, n), 4),
        (lambda k, n: normal(k, n), 4),
        (lambda k, n: uniform(k, n, torch.float64), 8),
        (lambda k, n: uniform(k, n, torch.bfloat16), 2),
        (lambda k, n: bits(k, n, torch.uint8), 1),
        (lambda k, n: bernoulli(k, 0.5, n), 1),
    ],
    ids=["uniform", "normal", "float64", "bfloat16", "bytes", "bernoulli"],
)
def test_memory(draw, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """At most four times the result, what is inside of the op included."""
    n = 2**20
    for op in ("uniform", "bits", "bernoulli"):
        monkeypatch.setattr(_threefry, op, getattr(_threefry, f"_{op}"))
    with LiveBytes() as meter:
        draw(key(0), n)
    assert meter.peak <= 4 * n * nbytes


compiles = pytest.mark.filterwarnings("ignore")  # the compiler's own


@compiles
def test_compiled_draws_are_the_same() -> None:
    def step(k: Tensor, x: Tensor) -> Tensor:
        return dropout(fold_in(k, 3), x) + uniform(split(k)[1], (8,))

    k, x = key(5), torch.ones(4, 8)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(k, x), step(k, x))
    mapped = torch.compile(vmap(step, in_dims=(0, None)), fullgraph=True)
    keys = split(k, 3)
    torch.testing.assert_close(mapped(keys, x), torch.stack([step(k, x) for k in keys]))


@compiles
def test_compiled_with_a_constant_key() -> None:
    """The compiler then computes with known numbers: an overflow would be folded into nonsense."""
    torch._dynamo.reset()
    f = torch.compile(lambda x: x + uniform(key(3), (2,)), fullgraph=True)
    assert torch.equal(f(torch.zeros(2)), uniform(key(3), (2,)))
