"""Threefry-2x32, the hash behind every key and every draw, and the torch ops made of it.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_MASK = 0xFFFFFFFF

# The right shift and the mask of each rotation, as 0-dim tensors: eager torch converts a Python number for each op,
# which takes as long as a small op.
_SCALARS = {
    distance: torch.tensor([32 - distance, (1 << distance) - 1], dtype=torch.int32, device="cpu").unbind()
    for distance in sum(_ROTATIONS, ())
}


def threefry2x32(k0: Tensor, k1: Tensor, c0: Tensor | int, c1: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
    """Hash the counters `(c0, c1)` under the key `(k0, k1)`. Returns two of the three `buffers`; the third is scratch.

    All tensors are int32: torch's uint32 has no arithmetic, and int32 wraps in the same way.
    """
    if torch.compiler.is_compiling():
        return _threefry2x32_wide(k0, k1, c0, c1)
    # For speed, a round has five passes over memory, and none of them allocates.
    x0, x1, spare = buffers
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    torch.add(c1, k1, out=x1)
    torch.add(x1, c0 + k0, out=x0)  # the first round's addition is done with it
    for group in range(5):
        for i, distance in enumerate(_ROTATIONS[group % 2]):
            if group or i:
                x0.add_(x1)
            # rotate left: the mask removes the sign bits that int32's >> shifts in; `alpha` is the left shift
            shift, mask = _SCALARS[distance]
            rotated = torch.bitwise_right_shift(x1, shift, out=spare).bitwise_and_(mask)
            rotated.add_(x1, alpha=1 << distance).bitwise_xor_(x0)
            spare, x1 = x1, rotated
        x0.add_(keys[(group + 1) % 3])
        x1.add_(keys[(group + 2) % 3] + (group + 1))
    return x0, x1


def _threefry2x32_wide(k0: Tensor, k1: Tensor, c0: Tensor | int, c1: Tensor) -> tuple[Tensor, Tensor]:
    """The same in int64, for torch.compile: it fuses the ops, and in its C++ code an int32 must not overflow."""
    k0, k1, c1 = (x.to(torch.int64) & _MASK for x in (k0, k1, c1))
    # `as_strided` makes the compiler store each value (in a register, after fusion). Otherwise it would inline the
    # expression at each use, and its size would double with each round.
    x0, x1 = _rounds(k0, k1, c0, c1, lambda x: x.as_strided(x.shape, x.stride()))
    return x0.to(torch.int32), x1.to(torch.int32)


def _rounds(k0: Any, k1: Any, c0: Any, c1: Any, store: Callable[[Any], Any] = lambda x: x) -> tuple[Any, Any]:
    """The hash of Python ints or int64 tensors in [0, 2**32)."""
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = (c0 + k0) & _MASK, (c1 + k1) & _MASK
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = store((x0 + x1) & _MASK)
            x1 = store(((x1 << distance | x1 >> 32 - distance) & _MASK) ^ x0)
        x0 = (x0 + keys[(group + 1) % 3]) & _MASK
        x1 = (x1 + keys[(group + 2) % 3] + (group + 1)) & _MASK
    return x0, x1


def _fill(key: Tensor, shape: list[int], dtype: torch.dtype, write: Callable[[Tensor, Tensor, Tensor], Any]) -> Tensor:
    """Make a tensor of shape `key.shape[:-1] + shape`, block by block: `write(block, high words, low words)`.

    Element i of a draw comes from the hash of the 64-bit counter i.
    """
    n = math.prod(shape)
    keys = key.to(torch.int32).reshape(-1, 2)
    out = keys.new_empty((len(keys), n), dtype=dtype)
    size = n if torch.compiler.is_compiling() else _block_size(n * dtype.itemsize, key.device)
    rows = max(1, size // max(1, n))
    buffers = keys.new_empty((3, min(rows, len(keys)), min(n, size)))
    for row in range(0, len(keys) if n else 0, rows):
        k0, k1 = keys[row : row + rows, :, None].unbind(1)
        low = torch.arange(min(n, size), dtype=torch.int32, device=key.device)
        for start in range(0, n, size):
            block = out[row : row + rows, start : start + size]
            height, width = block.shape
            write(block, *threefry2x32(k0, k1, start >> 32, low[:width], buffers[:, :height, :width]))
            low.add_(size)
    return out.view((*key.shape[:-1], *shape))


def _block_size(nbytes: int, device: torch.device) -> int:
    # While a block is made, an element takes up to 32 bytes. A block takes at most three times the memory of the
    # result. On a CPU, the cap keeps the hash's three buffers in the caches (3 MB, more if more cores share the work).
    # On a GPU, it keeps the number of launches small. The size is a power of two, so that no block crosses a multiple
    # of 2**32, where the high word of the counter changes.
    cap = max(18, 15 + torch.get_num_threads().bit_length()) if device.type == "cpu" else 24
    return 1 << min(max(16, (3 * nbytes // 32).bit_length() - 1), cap)


def _fold_in(key: Tensor, data: Tensor) -> Tensor:
    if data.numel() <= 16 and data.device.type == "cpu" and not torch.compiler.is_compiling():
        # Python hashes one number in the time of ten torch ops. The hash by torch takes 100 ops for any number of them.
        pairs = zip(key.reshape(-1, 2).tolist(), data.flatten().tolist(), strict=True)
        hashes = [_rounds(k0, k1, 0, number & _MASK) for (k0, k1), number in pairs]
        return torch.tensor(hashes, dtype=torch.uint32, device="cpu").reshape(key.shape)
    k0, k1 = key.to(torch.int32).unbind(-1)
    words = threefry2x32(k0, k1, 0, data, (k0 + data).new_empty((3, *data.shape)))
    return torch.stack(words, -1).to(torch.uint32)


_WORDS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}


def _bits(key: Tensor, shape: list[int], width: int) -> Tensor:
    def write(block: Tensor, high: Tensor, low: Tensor) -> None:
        if width == 64:
            block.copy_(high).bitwise_left_shift_(32).bitwise_or_(low.to(torch.int64).bitwise_and_(0xFFFFFFFF))
        else:
            block.copy_(high.bitwise_xor_(low))

    signed = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    words = _fill(key, shape, signed, write)
    # Compiled, a draw may be under `vmap`, which has no rule for `view(dtype)` before torch 2.13.
    return words.to(_WORDS[width]) if torch.compiler.is_compiling() else words.view(_WORDS[width])


# dtype: bits drawn for one element (for bfloat16 a byte is enough), and the number of these in the fraction
_FRACTION = {torch.float16: (16, 10), torch.bfloat16: (8, 7), torch.float32: (32, 23), torch.float64: (64, 52)}


def _fraction(dtype: torch.dtype, high: Tensor, low: Tensor) -> Tensor:
    """Uniform integers in [0, 2**digits): divided by 2**digits, they are uniform in [0, 1)."""
    width, digits = _FRACTION[dtype]
    if width == 64:
        high = high.to(torch.int64).bitwise_left_shift_(32)
        low = low.to(torch.int64).bitwise_and_(0xFFFFFFFF)
    return high.bitwise_xor_(low).bitwise_right_shift_(width - digits).bitwise_and_((1 << digits) - 1)


def _uniform(key: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    scale = 2.0 ** -_FRACTION[dtype][1]
    return _fill(key, shape, dtype, lambda block, *words: block.copy_(_fraction(dtype, *words)).mul_(scale))


def _bernoulli(key: Tensor, shape: list[int], dtype: torch.dtype, p: float) -> Tensor:
    scale = 2.0 ** -_FRACTION[dtype][1]
    return _fill(
        key, shape, torch.bool, lambda block, *words: block.copy_(_fraction(dtype, *words).to(dtype).mul_(scale) < p)
    )


# NOTE [Draws are torch ops]
# A draw is one op of our own, not a hundred ops of torch. Below every transform the op sees plain tensors, so it can
# work in place and block by block, and loop until all proposals are accepted. A mode that sees each op (remat's, a
# policy's) sees only one, and a batch of keys is one call. Under torch.compile, draws are inlined where possible,
# because the compiler can't fuse an op of ours with others.


def define_op(
    fun: Callable[..., Tensor],
    signature: str,
    fake: Callable[..., Tensor],
    *,
    name: str | None = None,
    inline: bool = True,
) -> Callable[..., Tensor]:
    """Define `fun` as a torch op of `signature`. `vmap` adds its batch dimension in front of all tensors."""
    name = name or f"threefry{fun.__name__}"
    torch.library.define(f"remat::{name}", signature)
    torch.library.impl(f"remat::{name}", "default", fun)
    torch.library.register_fake(f"remat::{name}", fake)
    op = getattr(torch.ops.remat, name).default

    def batched(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        def in_front(arg: Any, dim: int | None) -> Any:
            if isinstance(arg, Tensor):
                return arg.expand(info.batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)
            return arg

        return op(*map(in_front, args, in_dims)), 0

    torch.library.register_vmap(f"remat::{name}", batched)
    if not inline:
        return op
    return functools.wraps(fun)(lambda *args: fun(*args) if torch.compiler.is_compiling() else op(*args))


def _empty(key: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return key.new_empty((*key.shape[:-1], *shape), dtype=dtype)


bits = define_op(
    _bits, "(Tensor key, SymInt[] shape, int width) -> Tensor", lambda k, s, width: _empty(k, s, _WORDS[width])
)
uniform = define_op(_uniform, "(Tensor key, SymInt[] shape, ScalarType dtype) -> Tensor", _empty)
bernoulli = define_op(
    _bernoulli,
    "(Tensor key, SymInt[] shape, ScalarType dtype, float p) -> Tensor",
    lambda key, shape, dtype, p: _empty(key, shape, torch.bool),
)
fold_in = define_op(_fold_in, "(Tensor key, Tensor data) -> Tensor", lambda key, data: torch.empty_like(key))
