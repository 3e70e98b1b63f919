"""Keys: what they are, how they are made, and that they are independent."""

import copy
import io

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import remat.random
from remat.random import PRNGKey, bits, clone, fold_in, key, key_data, normal, split, uniform, wrap_key_data


def test_a_key_is_a_plain_tensor() -> None:
    k = key(7)
    assert type(k) is Tensor
    assert (k.dtype, k.shape, k.device) == (torch.uint32, (2,), torch.device("cpu"))
    assert torch.equal(PRNGKey(7), k)
    assert torch.equal(copy.deepcopy(k), k)
    torch.save(k, file := io.BytesIO())
    assert torch.equal(torch.load(io.BytesIO(file.getvalue())), k)
    assert torch.equal(wrap_key_data(key_data(k)), k)
    assert torch.equal(clone(k), k)
    assert clone(k).data_ptr() != k.data_ptr()
    a, b = split(k)
    assert torch.equal(torch.stack([a, b])[1], b)
    if torch.__version__ >= (2, 13):  # before, it takes no uint32
        assert torch.equal(torch.where(torch.tensor(True), a, b), a)
    assert key(1, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert key(1).device.type == "meta"
    assert uniform(key(1, device="meta"), (3,)).shape == (3,)


def test_seeds_wrap() -> None:
    assert key(-1).tolist() == [0, 2**32 - 1]
    assert key(2**32 + 5).tolist() == [0, 5]
    assert torch.equal(key(torch.tensor(-3)), key(-3))
    assert torch.equal(key(torch.tensor(2**32 - 3)), key(-3))
    assert torch.equal(vmap(key)(torch.arange(3)), torch.stack([key(i) for i in range(3)]))


@pytest.mark.parametrize("seed", [1.5, "a", None, torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(True)])
def test_no_seed(seed: object) -> None:
    with pytest.raises(TypeError, match=r"key: seed must be an int.*got"):
        key(seed)  # type: ignore[arg-type]


def test_too_large_a_seed() -> None:
    with pytest.raises(OverflowError, match=r"from -2\*\*63 to 2\*\*63 - 1; got 9223372036854775808"):
        key(2**63)


def test_splitting_is_folding() -> None:
    k = key(3)
    assert torch.equal(split(k, 5), fold_in(k, torch.arange(5)))
    assert torch.equal(split(k, 9)[:5], split(k, 5))
    assert torch.equal(split(k, (2, 3)).reshape(6, 2), split(k, 6))
    assert split(k, ()).shape == (2,)
    assert split(k, 0).shape == (0, 2)
    keys = split(k, 4)
    assert torch.equal(split(keys, 3), torch.stack([split(one, 3) for one in keys]))
    assert torch.equal(vmap(split)(keys), split(keys))


def test_fold_in_broadcasts() -> None:
    keys, data = split(key(3), 4), torch.arange(4)
    each = torch.stack([fold_in(k, i) for i, k in enumerate(keys)])
    assert torch.equal(fold_in(keys, data), each)
    assert torch.equal(vmap(fold_in)(keys, data), each)
    assert torch.equal(vmap(fold_in, in_dims=(None, 0))(keys[0], data), fold_in(keys[0], data))
    assert torch.equal(vmap(fold_in, in_dims=(0, None))(keys, data), fold_in(keys[:, None], data))
    assert torch.equal(fold_in(keys, 7)[2], fold_in(keys[2], 7))
    assert torch.equal(fold_in(keys[0], -1), fold_in(keys[0], 2**32 - 1))
    assert torch.equal(fold_in(keys[0], torch.tensor(-1)), fold_in(keys[0], 2**32 - 1))
    with pytest.raises(ValueError, match=r"must broadcast; got keys of shape \(4,\) and data of shape \(3,\)"):
        fold_in(keys, torch.arange(3))


@pytest.mark.parametrize("data", [2**32, 2**40, -(2**31) - 1])
def test_fold_in_too_large_a_number(data: int) -> None:
    with pytest.raises(ValueError, match=rf"fold_in: data must fit in 32 bits; got {data}\."):
        fold_in(key(0), data)


@pytest.mark.parametrize("data", [1.5, torch.tensor(1.5), None])
def test_fold_in_no_number(data: object) -> None:
    with pytest.raises(TypeError, match=r"fold_in: data must be an int or an integer tensor; got"):
        fold_in(key(0), data)  # type: ignore[arg-type]


def test_a_key_that_is_viewed_as_integers() -> None:
    with pytest.raises(TypeError, match=r"normal: .*got an int32 .* \(2,\). View it back: .view\(torch.uint32\)\.$"):
        normal(key(0).view(torch.int32))


NO_KEYS = [None, 3, [0, 1], torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.uint32)]


@pytest.mark.parametrize("wrong", NO_KEYS, ids=str)
@pytest.mark.parametrize("function", [uniform, split, clone, key_data, wrap_key_data, normal], ids=lambda f: f.__name__)
def test_no_key(function, wrong: object) -> None:  # type: ignore[no-untyped-def]
    name = function.__name__
    with pytest.raises(TypeError, match=rf"remat.random.{name}: a key is a uint32 tensor of shape \(2,\).*seed.*got"):
        function(wrong)


def test_siblings_are_independent() -> None:
    """The streams of keys made by `split` and `fold_in` of one key, and of neighbouring seeds, do not correlate."""
    n = 4096
    for keys in (
        split(key(1), 64),
        fold_in(key(1), torch.arange(1000, 1064)),
        vmap(key)(torch.arange(64)),
        split(split(key(1), 8), 8).reshape(64, 2),
    ):
        correlation = torch.corrcoef(normal(keys, n))
        correlation.fill_diagonal_(0)
        assert correlation.abs().max() < 5 / n**0.5


def test_bits_are_fair() -> None:
    n = 100_000
    drawn = bits(key(4), n).to(torch.int64)
    for bit in range(32):
        assert abs(float((drawn >> bit & 1).float().mean()) - 0.5) < 4 * 0.5 / n**0.5
    # Each output bit flips with probability 1/2 when one bit of the seed or of the number folded in does.
    for change in (lambda i: key(i), lambda i: fold_in(key(0), i)):
        base = bits(change(0), 1000).to(torch.int64)
        for bit in (0, 7, 31):
            flipped = base ^ bits(change(1 << bit), 1000).to(torch.int64)
            ones = sum(int((flipped >> b & 1).sum()) for b in range(32))
            assert abs(ones / 32_000 - 0.5) < 4 * 0.5 / 32_000**0.5


def test_the_names_are_those_of_jax() -> None:
    import inspect

    jax = pytest.importorskip("jax")
    left_out = {"key_impl", "key_dtype"}  # there is one kind of key
    names = {n for n in vars(jax.random) if not n.startswith("_") and inspect.isfunction(getattr(jax.random, n))}
    for name in names - left_out:
        theirs = list(inspect.signature(getattr(jax.random, name)).parameters)
        ours = list(inspect.signature(getattr(remat.random, name)).parameters)
        not_here = {"out_sharding", "impl", "dtype" if name in ("key", "wrap_key_data") else "", "unroll"}
        assert [p for p in theirs if p not in not_here] == [p for p in ours if p != "device"], name
