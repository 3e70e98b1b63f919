"""What the code of a function names, and the names that are known not to do anything but compute."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import math
import types
from typing import Any, NamedTuple

_BODY_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def runs_later(function: Any) -> bool:
    """Whether the body of a function or method runs after the call: it is a generator or async function."""
    if type(function) not in (types.FunctionType, types.MethodType):
        return False
    code = getattr(function, "__code__", None)  # a method may be one of any callable
    return code is not None and bool(code.co_flags & _BODY_LATER)


def words(text: str) -> frozenset[str]:
    """Those in a text."""
    return frozenset(text.split())


OPS = words("""
    abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr adjoint affine_grid all
    allclose alpha_dropout amax amin aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh
    argmax argmin argsort argwhere asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d
    avg_pool2d avg_pool3d baddbmm bernoulli bilinear binary_cross_entropy binary_cross_entropy_with_logits
    bitwise_and bitwise_not bitwise_or bitwise_xor block_diag bmm broadcast_tensors broadcast_to bucketize
    cartesian_prod cat cdist ceil celu chain_matmul channel_shuffle cholesky cholesky_ex cholesky_inverse
    cholesky_solve chunk clamp clamp_max clamp_min clip clone column_stack complex concat concatenate conj
    conj_physical contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d copysign
    corrcoef cos cosh cosine_embedding_loss cosine_similarity count_nonzero cov cross cross_entropy cummax cummin
    cumprod cumsum cumulative_trapezoid deg2rad det detach diag diag_embed diagflat diagonal diagonal_scatter diff
    digamma div divide dot dropout dropout1d dropout2d dropout3d dsplit dstack eig eigh eigvals eigvalsh einsum elu
    entr eq equal erf erfc erfcx erfinv exp exp2 expand expand_as expit expm1 eye fft2 fftfreq fftn fftshift fill
    finfo fix flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod fold frac full full_like
    gammainc gammaincc gammaln gather gaussian_nll_loss ge gelu glu gradient greater greater_equal grid_sample
    group_norm gt hardshrink hardsigmoid hardswish hardtanh heaviside hfft hinge_embedding_loss householder_product
    hsplit hstack huber_loss hypot i0 i0e i1 i1e ifft ifft2 ifftn ifftshift igamma igammac ihfft iinfo index_add
    index_copy index_fill index_put index_select inner interpolate inv inverse irfft irfft2 irfftn is_tensor isclose
    isfinite isin isinf isnan isneginf isposinf isreal istft item kl_div kron kthvalue l1_loss layer_norm ldexp le
    leaky_relu lerp less less_equal lgamma linear linspace local_response_norm log log10 log1p log2 log_ndtr
    log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit
    logsigmoid logspace logsumexp lp_pool1d lp_pool2d lstsq lt lu lu_factor lu_solve margin_ranking_loss masked_fill
    masked_scatter masked_select matmul matrix_exp matrix_norm matrix_power max max_pool1d max_pool2d maximum mean
    median meshgrid min minimum mish mm moveaxis movedim mse_loss mul multi_dot multi_margin_loss multigammaln
    multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow ndtr ndtri ne neg
    negative new_full new_ones new_zeros nextafter nll_loss nonzero norm normal normalize not_equal numel one_hot
    ones ones_like outer pad pairwise_distance pdist permute pinv pinverse pixel_shuffle pixel_unshuffle
    poisson_nll_loss polar polygamma positive pow prelu prod psi qr quantile rad2deg rand rand_like randint
    randint_like randn randn_like randperm ravel reciprocal relu relu6 remainder repeat repeat_interleave reshape
    reshape_as resolve_conj rfft rfft2 rfftfreq rfftn rms_norm roll rot90 round rsqrt rsub
    scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted select select_scatter selu sgn
    sigmoid sign signbit silu sin sinc sinh size slice_scatter slogdet smooth_l1_loss soft_margin_loss softmax
    softmin softplus softshrink softsign solve solve_triangular split sqrt square squeeze stack std std_mean stft
    sub subtract sum sum_to_size svd svdvals swapaxes swapdims t take take_along_dim tan tanh tanhshrink tensor
    tensor_split tensordot tensorinv tensorsolve threshold tile to tolist topk trace transpose trapezoid tril
    tril_indices triplet_margin_loss triu triu_indices true_divide trunc type_as unbind unflatten unfold unique
    unique_consecutive unsqueeze vander var var_mean vdot vecdot vector_norm view view_as view_as_complex
    view_as_real vsplit vstack where xlog1py xlogy zeros zeros_like zeta
    """)
DRAWS = words("""
    alpha_dropout bernoulli dropout dropout1d dropout2d dropout3d multinomial normal rand rand_like randint randint_like
    randn randn_like randperm scaled_dot_product_attention
    """)
_ATTRIBUTES = words("""
    T H mT mH device dtype dim ndim real imag shape type values indices nn functional special linalg fft
    Size Tensor bool float double half long int bfloat16 bfloat float16 float32 float64 int8 int16 int32 int64 uint8
    complex64 complex128 cpu cuda inf pi e nan newaxis eps tiny is_floating_point is_complex is_cuda stride mode
    eigenvalues eigenvectors logabsdet solution
    copy count endswith get items join keys lower startswith upper
    """)
ACCESS = words("tensor_split tolist")  # to the memory of a tensor, without an op
CHANGES_CONTAINERS = words("append clear extend insert pop popitem remove reverse setdefault sort update")
_MATH = frozenset(n for n in dir(math) if not n.startswith("_"))
KNOWN_NAMES = OPS | _ATTRIBUTES | CHANGES_CONTAINERS | _MATH
MAY_BE_INPLACE = words("""
    alpha_dropout celu dropout dropout1d dropout2d dropout3d elu hardsigmoid hardswish hardtanh leaky_relu mish relu
    relu6 selu silu threshold
    """)
_REFUSED = tuple(
    words("""
    BEFORE_WITH BUILD_SET DELETE_ATTR DELETE_DEREF DELETE_GLOBAL DELETE_NAME DELETE_SUBSCR GET_AWAITABLE IMPORT_
    INPLACE_ LOAD_BUILD_CLASS LOAD_NAME LOAD_SPECIAL LOAD_SUPER_ATTR MATCH_CLASS PUSH_EXC_INFO SEND SETUP_FINALLY
    SETUP_WITH SET_ADD SET_UPDATE STORE_ATTR STORE_GLOBAL STORE_NAME STORE_SLICE STORE_SUBSCR YIELD_
    """)
)

_ASKING = ("LOAD_ATTR", "LOAD_METHOD")
_COMPARING = ("COMPARE_OP", "CONTAINS_OP", "CONVERT_VALUE", "FORMAT_")


class Code(NamedTuple):
    """What code names, and what else it does."""

    globals: frozenset[str]
    attributes: frozenset[str]
    paths: frozenset[tuple[str, ...]]
    """Globals, each with the attributes that it is asked for in a row: `torch.nn.init`."""
    unpacks: bool
    compares: bool
    """Whether it may ask an object for all that it holds: whether it is equal to another, or for its text."""
    slices: bool


@functools.lru_cache(1000)  # of the codes of a notebook, say
def names_of(code: types.CodeType) -> Code | None:
    """What code, and the functions defined in it, name. None: it does what is not known."""
    if code.co_flags & (0x20 | 0x80 | 0x200) and code.co_name != "<genexpr>":  # generators and coroutines
        return None
    globals_, attributes, paths = set[str](), set[str](), set[tuple[str, ...]]()
    unpacks = compares = slices = False
    instructions = list(dis.get_instructions(code))
    for at, i in enumerate(instructions):
        if i.opname == "STORE_DEREF" and i.argval in code.co_freevars:
            return None
        if i.opname.startswith("YIELD_") and code.co_name == "<genexpr>":
            continue
        if i.opname.startswith(_REFUSED) or (i.opname == "BINARY_OP" and i.argrepr.endswith("=")):
            return None
        if i.opname.startswith("LOAD_DEREF") and i.argval == "__class__":
            return None
        if i.opname == "LOAD_GLOBAL":
            globals_.add(i.argval)
            asked = itertools.takewhile(lambda j: j.opname in _ASKING, instructions[at + 1 :])
            paths.add((i.argval, *(j.argval for j in asked)))
        elif i.opname in _ASKING:
            attributes.add(i.argval)
        unpacks |= i.opname == "CALL_FUNCTION_EX" and i.arg != 0  # newer Pythons do not say
        compares |= i.opname.startswith(_COMPARING)
        slices |= "SLICE" in i.opname or type(i.argval) is slice
    keywords = {n for c in code.co_consts for n in (c if isinstance(c, tuple) else (c,)) if isinstance(n, str)}
    if keywords & {"out", "generator", "requires_grad"} or ("inplace" in keywords and "inplace" not in attributes):
        return None
    if (attributes | globals_) & MAY_BE_INPLACE and _gives_true(instructions, code.co_consts):  # F.relu(x, True)
        return None
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = names_of(const)
            if inner is None:
                return None
            globals_ |= inner.globals
            attributes |= inner.attributes
            paths |= inner.paths
            unpacks, compares, slices = unpacks or inner.unpacks, compares or inner.compares, slices or inner.slices
    compares |= "str" in globals_
    return Code(frozenset(globals_), frozenset(attributes), frozenset(paths), unpacks, compares, slices)


@functools.lru_cache(1000)
def asks_alone(code: types.CodeType) -> bool:
    """Whether a method does nothing with its `self` but ask it for attributes: it does not call it or hand it on."""
    if not code.co_argcount:
        return False
    return _asks_alone(code, code.co_varnames[0])


def _asks_alone(code: types.CodeType, name: str) -> bool:
    for i, following in itertools.pairwise(dis.get_instructions(code)):
        names = i.argval if type(i.argval) is tuple else (i.argval,)  # two in one instruction: the last is on top
        if (
            name in names
            and "LOAD" in i.opname
            and i.opname != "LOAD_CLOSURE"
            and (name in names[:-1] or following.opname not in _ASKING)
        ):
            return False
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType) and name in c.co_freevars]
    return all(_asks_alone(c, name) for c in inner)


def _gives_true(instructions: list[dis.Instruction], constants: tuple[Any, ...]) -> bool:
    """Whether True may be given to something by its position. `is_causal=True` is not."""
    named = set()
    for end, i in enumerate(instructions):
        names: tuple[str, ...] = constants[i.arg] if i.opname == "KW_NAMES" and i.arg is not None else ()
        for at, name in zip(range(end - 1, 0, -1), reversed(names), strict=False):
            if instructions[at].opname not in ("LOAD_CONST", "LOAD_FAST") or name == "inplace":
                break
            named.add(at)
    return any(
        i.opname == "LOAD_CONST" and _has_true(i.argval) and at not in named for at, i in enumerate(instructions)
    )


def _has_true(constant: Any) -> bool:
    return any(map(_has_true, constant)) if type(constant) is tuple else constant is True
