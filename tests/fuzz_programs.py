"""Random programs under random nests of transforms, as Python source: what fails is printed as it was run.

An `Example` defines `program(remat, x0, ...)`, which calls functions through `remat`; `transform(f)`, up to
three transforms around it; and `args`. It runs twice, with `remat` and with `plain`, and both have to agree.

The source is written line by line, and each line is run on the way, so that shapes and dtypes are known
where the next one is drawn. Values stay small, for high derivatives are compared to many digits.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import optree
import torch
from helpers import as_memory, numbers, plain
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, jvp, linearize, vjp, vmap
from torch.nn import functional as F

from remat import loops

# What programs are made of, besides torch.


class SinTimes(torch.autograd.Function):
    """sin(a) * b, by hand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.sin(as_memory(a)) * b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return (g * torch.cos(a) * b).sum_to_size(a.shape), (g * torch.sin(a)).sum_to_size(b.shape)

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return da * torch.cos(a) * b + torch.sin(a) * db


class Affine:
    """A callable object that holds tensors."""

    def __init__(self, w: Tensor, b: Tensor) -> None:
        self.w = w
        self.b = b

    def __call__(self, h: Tensor) -> Tensor:
        return torch.tanh(h * self.w + self.b)

    def method(self, h: Tensor) -> Tensor:
        return self(h)


class Slots:
    """Holds two tensors where no search finds them."""

    __slots__ = ("a", "b")

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a = a
        self.b = b


LINEAR = nn.Linear(3, 3).double()
with torch.no_grad():
    for i, p in enumerate(LINEAR.parameters()):
        p.copy_(numbers(*p.shape, seed=i))


class Net(nn.Module):
    """A module with a remat'd function inside, which reads the parameters of `linear`."""

    def __init__(self, remat: Any) -> None:
        super().__init__()
        self.linear = LINEAR
        self.block = remat(lambda x: torch.tanh(self.linear(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.sin(x))


# What nests are made of: each turns a function of tensors into another function of the same tensors.


def floats(f: Any) -> Any:
    """The results that have a derivative, as a tuple."""
    return lambda *args: tuple(
        t for t in optree.tree_leaves(f(*args)) if isinstance(t, Tensor) and t.is_floating_point()
    )


def scalar(f: Any) -> Any:
    """A loss that weighs the elements differently, and does not let large ones, with their rounding, run away."""

    def weighted(t: Tensor) -> Tensor:
        weights = torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape)
        return (torch.asinh(t) * weights).sum()

    return lambda *args: sum(map(weighted, floats(f)(*args)), torch.zeros((), dtype=torch.float64))


def scalar_aux(f: Any) -> Any:
    def loss(*args: Tensor) -> Any:
        out = f(*args)
        return scalar(lambda: out)(), tuple(t for t in optree.tree_leaves(out) if isinstance(t, Tensor))

    return loss


def _directions(tensors: Any) -> tuple[Tensor, ...]:
    return tuple(torch.cos(t) + 0.5 for t in tensors)


def vjp_once(f: Any) -> Any:
    def result(*args: Tensor) -> Any:
        out, pull = vjp(floats(f), *args)
        return out, pull(_directions(out))

    return result


def vjp_never(f: Any) -> Any:
    return lambda *args: vjp(floats(f), *args)[0]


def vjp_twice(f: Any) -> Any:
    def result(*args: Tensor) -> Any:
        out, pull = vjp(floats(f), *args)
        return pull(_directions(out)), pull(out)

    return result


def vjp_later(f: Any) -> Any:
    """The pullback is called under transforms that have begun since."""

    def result(*args: Tensor) -> Any:
        out, pull = vjp(floats(f), *args)
        given = _directions(out)
        return (
            vmap(lambda s: pull(tuple(s * g for g in given)))(torch.arange(2.0)),
            jvp(lambda *g: scalar(pull)(g), given, out),
            grad(lambda *g: scalar(pull)(g))(*given) if given else None,
        )

    return result


def jvp_all(f: Any) -> Any:
    return lambda *args: jvp(floats(f), args, _directions(args))


def jvp_first(f: Any) -> Any:
    return lambda x, *rest: jvp(lambda x: floats(f)(x, *rest), (x,), _directions((x,)))


def linearize_all(f: Any) -> Any:
    def result(*args: Tensor) -> Any:
        out, push = linearize(floats(f), *args)
        return out, push(*_directions(args))

    return result


def autograd_inside(f: Any) -> Any:
    """`torch.autograd.grad` in the function that is transformed."""

    def result(*args: Tensor) -> Any:
        loss = scalar(f)(*args)
        wrt = [a for a in args if a.requires_grad]
        grads = torch.autograd.grad(loss, wrt, create_graph=True, allow_unused=True) if wrt else ()
        return loss, *(g for g in grads if g is not None)

    return result


def _leaves(args: Any) -> list[Tensor]:
    return [a.detach().clone().requires_grad_() for a in args]


def backward(f: Any) -> Any:
    def result(*args: Tensor) -> Any:
        args = _leaves(args)
        loss = scalar(f)(*args)
        if loss.requires_grad:
            loss.backward()
        return loss, [a.grad for a in args]

    return result


def backward_twice(f: Any) -> Any:
    def result(*args: Tensor) -> Any:
        args = _leaves(args)
        loss = scalar(f)(*args)
        if not loss.requires_grad:
            return loss
        first = torch.autograd.grad(loss, args, retain_graph=True, allow_unused=True)
        return first, torch.autograd.grad(loss, args[-1], allow_unused=True)

    return result


def double_backward(f: Any) -> Any:
    def result(*args: Tensor) -> Any:
        args = _leaves(args)
        loss = scalar(f)(*args)
        if not loss.requires_grad:
            return loss
        grads = torch.autograd.grad(loss, args, create_graph=True, allow_unused=True)
        norm = sum(g.square().sum() for g in grads if g is not None)
        if not isinstance(norm, Tensor) or not norm.requires_grad:
            return grads
        return grads, torch.autograd.grad(norm, args, allow_unused=True)

    return result


# What the source can name.
def scan(remat: Any, body: Any, carry: Tensor, xs: Tensor, checkpoints: int | None) -> Any:
    """`remat.scan`, or the plain loop."""
    if remat is not plain:
        return loops.scan(body, carry, xs, checkpoints=checkpoints)
    ys = []
    for x in xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


NAMES = {**vars(torch.func), **globals(), "F": F, "SimpleNamespace": SimpleNamespace, "deque": deque}


class Example:
    """A program, the transforms around it, and its arguments."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __repr__(self) -> str:
        return f"\n{self.source}\n"

    def run(self, remat: Any) -> Any:
        """The result with this `remat`, drawing from a fresh seed."""
        linecache.cache["<example>"] = len(self.source), None, self.source.splitlines(True), "<example>"
        defined: dict[str, Any] = dict(NAMES)
        exec(compile(self.source, "<example>", "exec"), defined)
        program = defined["program"]
        torch.manual_seed(0)
        return defined["transform"](lambda *args: program(remat, *args))(*defined.pop("args"))


# Expressions. `{a}`, `{b}`, `{c}` are tensors of doubles, `{i}` is one of integers.

EXPRESSIONS = """
    torch.sin({a})
    {a} + {b}
    {a} * {b}
    {a} - {b}
    {a} / (1 + {b} * {b})
    torch.tanh({a})
    torch.sigmoid({a})
    {a} ** 2
    F.gelu({a})
    F.relu({a})
    {a}.clamp(-0.5, 0.5)
    {a}.abs()
    torch.maximum({a}, {b})
    torch.where({a} > {b}, {a}, torch.cos({b}))
    torch.where({i} > 0, {a}, {b})
    {a}.masked_fill({b} > 0, 0.5)

    {a} @ {b}
    {a}.mT @ {b}
    torch.outer({a}, {b})
    torch.einsum('...i,...i->...', {a}, {b})
    F.linear({a}, {b}, {c})
    torch.addmm({a}, {b}, {c})

    {a}.sum()
    {a}.mean(0)
    {a}.sum(-1, keepdim=True)
    {a}.logsumexp(-1)
    {a}.amax(0)
    {a}.max(-1).values
    {a}.sort(-1).values
    {a}.cumsum(0)
    F.softmax({a}, -1)
    F.layer_norm({a}, {a}.shape[-1:])
    F.layer_norm({a}, (3,), {b}, {c})

    {a}[0]
    {a}[..., 1:]
    {a}[[1, 0]]
    {a}[{i}]
    {a}.gather(-1, {i})
    {a}.index_select(0, torch.tensor([0, 2]))
    {a}.index_add(0, torch.tensor([1]), {b}[:1])
    {a}.roll(1, 0)

    {a}.mT
    {a}.reshape(-1)
    {a}.unsqueeze(0)
    {a}.expand(2, *{a}.shape)
    {a}.diagonal()
    {a}.unbind(0)[1]
    torch.chunk({a}, 2)[0]
    {a}.movedim(0, -1).contiguous()
    {a}.squeeze(0)

    torch.stack([{a}, {b}])
    torch.cat([{a}, {b}])
    torch.ones(3, dtype=torch.float64) * {a}
    torch.zeros_like({a})
    torch.arange(3.0, dtype=torch.float64) + {a}
    torch.fft.fft({a}).real
    {a}.detach()
    {a}.clone()

    SinTimes.apply({a}, {b})
    Affine({a}, {b})({c})
    remat(Affine({a}, {b}))({c})
    remat(Affine({a}, {b}).method)({c})
    remat(partial(torch.addcmul, {a}, {b}))({c})
    remat(lambda h: h * {b})({a})
    remat(lambda h, w={b}: torch.sin(h * w))({a})
    remat(lambda: torch.sin({a}) * {b})()
    remat(torch.sin)({a})
    remat(SinTimes.apply)({a}, {b})
    remat(lambda h: SinTimes.apply(h, {b}))({a})
    remat(LINEAR)({a})
    functional_call(LINEAR, {{'weight': {b}, 'bias': {c}}}, ({a},))
    functional_call(Net(remat), {{'linear.weight': {b}, 'linear.bias': {c}}}, ({a},))

    grad(lambda t: (torch.sin(t) * {b}).sum())({a})
    vmap(lambda t: torch.tanh(t * {b}))({a})
    jvp(lambda t: torch.sin(t) * {b}, ({a},), (torch.cos({a}),))[1]
    jacrev(lambda t: torch.sin(t * {b}))({a})
    vjp(torch.sin, {a})[1]({b})[0]
    vmap(remat(lambda t: torch.tanh(t * {b})))({a})
    grad(lambda t: remat(lambda h: torch.sin(h) * {b})(t).sum())({a})

    F.dropout({a}, 0.5)
    {a} + torch.rand_like({a})
    {a} * torch.randn(3, dtype=torch.float64)
    remat(F.dropout)({a}, 0.3)

    {a}.argsort(-1)
    {a}.argmax(0)
    ({a} > 0).long()
"""
EXPRESSIONS = [line.strip() for line in EXPRESSIONS.splitlines() if line.strip()]
RANDOM = ("dropout", "torch.rand")
FORWARD = ("jvp", "jacfwd", "hessian", "later")  # linearize can't go around these, nor around random draws

# Changes in place of a tensor `{v}` that was just made, maybe through a view `{u}` of it.
CHANGES = """
    {v}.mul_({b})
    {v}.add_({b})
    {v} += {b}
    {v}[0] = {b}
    {v}[..., 1:] = {b}
    {v}[0].mul_({b})
    {v}.copy_({b})
    {v}.zero_()
    {v}.masked_fill_({b} > 0, 0.5)
    {v}.unsqueeze(0)[..., :2].sub_(0.5)
    F.relu({v}, inplace=True)
    {u} = {v}[0]; {u}.mul_({b})
    {u} = {v}.mT; {v}.add_({b})
    {u} = {v}[1]; {v}[0] = {b}
"""
CHANGES = [line.strip() for line in CHANGES.splitlines() if line.strip()]


HIDDEN = ["deque([{}, {}])", "Slots({}, {})"]
COUNTS = ["add_(0.25)", "mul_(0.5)", "copy_(torch.full((3,), 0.1, dtype=torch.float64))"]


class _Scope:
    """The lines of a body, the values of its names, and the tensors that can be read in it."""

    def __init__(self, names: Iterator[int], values: dict[str, Any] | None = None) -> None:
        self.names = names
        self.values = dict(values or {})
        self.readable: list[str] = []  # expressions, the latest last
        self.own: list[str] = []  # names that can be bound again
        self.lines: list[str] = []
        self.counters: list[str] = []  # names of tensors that are written to

    def inner(self) -> _Scope:
        scope = _Scope(self.names, self.values)
        scope.readable = list(self.readable)
        scope.counters = list(self.counters)
        return scope

    def new(self, letter: str = "v") -> str:
        return f"{letter}{next(self.names)}"

    def value(self, code: str) -> Any:
        return eval(code, {**NAMES, "remat": plain, **self.values})

    def execute(self, line: str) -> bool:
        """Run a line and keep it; False where it can't be run."""
        values = {**NAMES, "remat": plain, **self.values}
        try:
            exec(line, values)
        except (RuntimeError, IndexError):
            return False
        self.values = {k: v for k, v in values.items() if k not in NAMES}
        self.lines.append(line)
        return True

    def define(self, name: str, value: Any) -> None:
        """Make the tensors in `value` readable under `name`."""
        self.values[name] = value
        self.readable = [e for e in self.readable if not _mentions(e, name)]
        accessors, tensors, _ = optree.tree_flatten_with_accessor(value)
        self.readable += [a.codify(name) for a, t in zip(accessors, tensors, strict=True) if _is_tensor(t)]

    def indented(self) -> list[str]:
        return [f"    {line}" for line in self.lines]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor) and 0 < x.numel() <= 81


def _mentions(expression: str, name: str) -> bool:
    return re.match(rf"{name}\b", expression) is not None


def _percent(draw: Any, chance: int) -> bool:
    """True in that many of a hundred cases. Shrinks to False."""
    return draw(st.integers(0, 99)) >= 100 - chance


@st.composite
def _read(draw: Any, scope: _Scope, integer: bool = False, chance: int = 0) -> str:
    """A tensor that can be read here, rather one of the latest; of integers if `integer`, or by `chance`."""
    integer = integer or (chance > 0 and _percent(draw, chance))
    options = [e for e in reversed(scope.readable) if scope.value(e).is_floating_point() != integer]
    if not options:
        return f"{draw(_read(scope))}.argsort(-1)" if integer else "torch.ones(3, dtype=torch.float64)"
    return draw(st.sampled_from(options if _percent(draw, 40) else options[:3]))


@st.composite
def _expression(draw: Any, scope: _Scope) -> str:
    template = draw(st.sampled_from(EXPRESSIONS))
    read = {k: draw(_read(scope, integer=k == "i")) for k in "abci" if f"{{{k}}}" in template}
    code = template.format(**read)
    try:
        if _is_tensor(scope.value(code)):
            return code
    except (RuntimeError, IndexError, ValueError):  # these shapes do not fit together
        pass
    return f"torch.sin({draw(_read(scope))})"


# Statements.


@st.composite
def _assignment(draw: Any, scope: _Scope) -> None:
    code = draw(_expression(scope))
    again = scope.own and _percent(draw, 15)
    name = draw(st.sampled_from(scope.own)) if again else scope.new()
    scope.lines.append(f"{name} = {code}")
    scope.define(name, scope.value(code))
    if not again:
        scope.own.append(name)


@st.composite
def _change(draw: Any, scope: _Scope, name: str) -> None:
    """Change the latest tensor in place."""
    for _ in range(draw(st.integers(1, 2))):
        template, view = draw(st.sampled_from(CHANGES)), scope.new()
        others = scope.inner()
        others.readable = [e for e in scope.readable if not _mentions(e, name)]
        done = scope.execute(template.format(v=name, u=view, b=draw(_read(others))))
        if done and "{u}" in template:
            scope.define(view, scope.values[view])
        if "relu" in template:
            break  # its derivative reads the result


@st.composite
def _copy_and_change(draw: Any, scope: _Scope) -> None:
    name = scope.new()
    code = draw(st.sampled_from(["{}.clone()", "{} + 0.5", "torch.zeros_like({})"])).format(draw(_read(scope)))
    scope.lines.append(f"{name} = {code}")
    scope.define(name, scope.value(code).clone())
    draw(_change(scope, name))


@st.composite
def _container(draw: Any, scope: _Scope) -> None:
    """Hold tensors in something, from where functions read them."""
    a, b = draw(_read(scope)), draw(_read(scope))
    name = scope.new("o")
    form = draw(st.sampled_from(["[{}, {}]", "{{'a': {}, 'b': ({},)}}", "SimpleNamespace(a={}, b={})", *HIDDEN]))
    scope.lines.append(f"{name} = {form.format(a, b)}")
    scope.define(name, scope.value(form.format(a, b)))
    if "a=" in form or "Slots" in form:
        scope.readable += [f"{name}.a", f"{name}.b"]
    elif "deque" in form:
        scope.readable = [e for e in scope.readable if not _mentions(e, name)] + [f"{name}[0]", f"{name}[1]"]


@st.composite
def _outside(draw: Any, scope: _Scope) -> None:
    """A tensor that functions under remat write to: a counter."""
    name, code = scope.new("c"), f"torch.full((3,), {draw(st.sampled_from(['0.5', '0.1']))}, dtype=torch.float64)"
    scope.lines.append(f"{name} = {code}")
    scope.values[name] = scope.value(code)
    scope.counters.append(name)


@st.composite
def _count(draw: Any, scope: _Scope) -> None:
    if not scope.counters:
        return
    counter, name = draw(st.sampled_from(scope.counters)), scope.new()
    scope.lines.append(f"{counter}.{draw(st.sampled_from(COUNTS))}")
    scope.lines.append(f"{name} = {counter} * {draw(_read(scope))}.sum()")
    scope.define(name, scope.value(scope.lines[-1].partition(" = ")[2]))
    scope.own.append(name)


@st.composite
def _hook(draw: Any, scope: _Scope) -> None:
    """A hook on a tensor that was just made. It is not called where nothing is differentiated."""
    name = scope.new()
    scope.lines.append(f"{name} = torch.sin({draw(_read(scope))})")
    scope.define(name, scope.value(scope.lines[-1].partition(" = ")[2]))
    scope.lines.append(f"{name}.requires_grad and {name}.register_hook(lambda g: None if g is None else g * 0.5)")


@st.composite
def _parameter(draw: Any, scope: _Scope, inner: _Scope) -> tuple[str, str]:
    """A parameter of a function defined in `scope` with this `inner` scope, and the argument to pass."""
    name, given = scope.new(), draw(_read(scope, chance=10))
    form = draw(st.sampled_from(["{}", "{0} keyword", "{0} default", "[{}, {}]", "{{'a': {}, 'b': {}}}", "[{0}, {0}]"]))
    inner.own.append(name)
    if "keyword" in form or "default" in form:
        inner.define(name, scope.value(given))
        return (name, f"{name}={given}") if "keyword" in form else (f"{name}={given}", "")
    argument = form.format(given, draw(_read(scope)))
    inner.define(name, scope.value(argument))
    return name, argument


@st.composite
def _block(draw: Any, scope: _Scope, depth: int) -> None:
    """A remat'd function that reads its arguments and from outside, and a call of it."""
    inner = scope.inner()
    pairs = [draw(_parameter(scope, inner)) for _ in range(draw(st.sampled_from([1, 2, 3, 0])))]
    pairs.sort(key=lambda pair: ("=" in pair[0], "=" in pair[1]))
    arguments = [a for _, a in pairs if a]
    draw(_statements(inner, depth + 1))
    results = [draw(_read(inner, chance=10)) for _ in range(draw(st.integers(1, 3)))]
    results = [f"{r}.detach()" if _percent(draw, 8) else r for r in results]
    form = "{}"
    if len(results) > 1:
        results += draw(st.sampled_from([[], ["None"], ["2"]]))
        form = draw(st.sampled_from(["({})", "[{}]", "{{'r': [{}]}}"]))
    result = form.format(", ".join(results))

    function, name = scope.new("f"), scope.new()
    scope.lines += [f"def {function}({', '.join(p for p, _ in pairs)}):", *inner.indented()]
    scope.lines.append(f"    return {result}")
    if arguments and "=" not in arguments[0] and _percent(draw, 15):
        wrapped = f"remat(partial({function}, {arguments.pop(0)}))"
    else:
        wrapped = f"remat({function})"
    scope.lines.append(f"{name} = {wrapped}({', '.join(arguments)})")
    scope.define(name, inner.value(result))
    value = scope.values[name]
    if isinstance(value, Tensor) and value.is_floating_point() and _percent(draw, 20):
        storages = [t.untyped_storage().data_ptr() for t in optree.tree_leaves(scope.values) if _is_tensor(t)]
        if storages.count(value.untyped_storage().data_ptr()) == 1:
            draw(_change(scope, name))


@st.composite
def _loop(draw: Any, scope: _Scope, depth: int) -> None:
    """A loop: what its variables are in one round has changed when the rerun comes."""
    h, w, first, second = scope.new(), scope.new(), draw(_read(scope)), draw(_read(scope))
    if scope.value(first).shape != scope.value(second).shape:
        second = f"torch.cos({first})"
    scope.lines += [f"{h} = torch.sin({draw(_read(scope))})", f"for {w} in ({first}, {second}):"]
    scope.define(h, scope.value(scope.lines[-2].partition(" = ")[2]))
    inner = scope.inner()
    inner.define(w, scope.value(first))
    draw(_statements(inner, depth + 1))
    inner.lines.append(f"{h} = torch.tanh({h} + {draw(_read(inner))}.sum())")
    scope.lines += inner.indented()


@st.composite
def _scan(draw: Any, scope: _Scope, depth: int) -> None:
    """A scan over two or three tensors of one shape."""
    carry, x, body, name = (scope.new() for _ in range(4))
    begin, first = draw(_read(scope)), draw(_read(scope))
    steps = draw(st.sampled_from([f"{first}, torch.cos({first})", f"{first}, 0.5 * {first}, torch.sin({first})"]))
    inner = scope.inner()
    inner.define(carry, scope.value(begin))
    inner.define(x, scope.value(first))
    draw(_statements(inner, depth + 1))
    result = f"torch.tanh({carry} + {draw(_read(inner))}.sum()), {draw(_read(inner))}"
    scope.lines += [f"def {body}({carry}, {x}):", *inner.indented(), f"    return {result}"]
    last, y = inner.value(result)
    checkpoints = draw(st.sampled_from([None, 1, 2]))
    scope.lines.append(f"{name} = scan(remat, {body}, {begin}, torch.stack([{steps}]), {checkpoints})")
    scope.define(name, (last, torch.stack([y] * (steps.count(", ") + 1))))


@st.composite
def _statements(draw: Any, scope: _Scope, depth: int) -> None:
    kinds = [_assignment] * 6 + [_copy_and_change, _container, _container, _count, _outside if depth == 0 else _count]
    if depth:
        kinds.append(_hook)
    if depth < 3:
        kinds += [partial(_block, depth=depth)] * 3 + [partial(_loop, depth=depth), partial(_scan, depth=depth)]
    for _ in range(6 - depth):
        if not _percent(draw, 80 - 10 * depth):
            break
        draw(draw(st.sampled_from(kinds))(scope))


# Nests.


def _argnums(draw: Any, count: int) -> str:
    return draw(st.sampled_from(["0", str(tuple(range(count))), str(count - 1)]))


@st.composite
def _vmap(draw: Any, shapes: list[tuple[int, ...]]) -> str:
    """A line, and `shapes` with a batch dimension of two where it maps."""
    dims: list[int | None] = []
    for i, shape in enumerate(shapes):
        options = [0, *range(1, len(shape) + 1), -1]
        dims.append(draw(st.sampled_from(options if i == 0 else [*options, None])))
    for i, dim in enumerate(dims):
        if dim is not None:
            at = dim % (len(shapes[i]) + 1)
            shapes[i] = (*shapes[i][:at], 2, *shapes[i][at:])
    options = [f"in_dims={tuple(dims)}", f"randomness='{draw(st.sampled_from(['same', 'different']))}'"]
    options += draw(st.sampled_from([[], ["chunk_size=1"]]))  # out_dims: torch fails where no result is batched
    return f"vmap(f, {', '.join(options)})"


@st.composite
def _transforms(draw: Any, shapes: list[tuple[int, ...]], random: bool) -> list[str]:
    """Lines of a nest around a function of tensors of these `shapes`, which become those of the nest."""
    n = len(shapes)
    inside = [
        lambda: f"grad(scalar(f), argnums={_argnums(draw, n)})",
        lambda: draw(_vmap(shapes)),
        lambda: "jvp_all(f)",
        lambda: "vjp_once(f)",
        lambda: f"jacrev(floats(f), argnums={_argnums(draw, n)})",
        lambda: f"jacfwd(floats(f), argnums={_argnums(draw, n)}, randomness='same')",
        lambda: "jacfwd(jacrev(scalar(f)), randomness='same')" if random else "hessian(scalar(f))",
        lambda: f"grad_and_value(scalar(f), argnums={_argnums(draw, n)})",
        lambda: f"grad(scalar_aux(f), argnums={_argnums(draw, n)}, has_aux=True)",
        lambda: draw(st.sampled_from(["vjp_never(f)", "vjp_twice(f)", "vjp_later(f)"])),
        lambda: "jvp_first(f)",
        lambda: "autograd_inside(f)",
    ]
    first = ["functionalize(f)", "functionalize(f, remove='mutations_and_views')"]
    last = ["backward(f)", "backward_twice(f)", "double_backward(f)", "linearize_all(f)"]
    lines = [draw(st.sampled_from(first))] if _percent(draw, 10) else []
    lines += [draw(st.sampled_from(inside))() for _ in range(draw(st.integers(1, 3 - len(lines))))]
    if len(lines) < 3 and _percent(draw, 50):
        if random or any(word in line for line in lines for word in FORWARD):
            last.remove("linearize_all(f)")
        lines.append(draw(st.sampled_from(last)))
    return lines


def _numbers(shape: tuple[int, ...], seed: int) -> str:
    return f"numbers({', '.join(map(str, shape))}, seed={seed})" if shape else f"numbers(1, seed={seed}).sum()"


@st.composite
def examples(draw: Any) -> Example:
    """Random examples."""
    shapes = [draw(st.sampled_from([(3,), (3, 3), ()])) for _ in range(draw(st.integers(1, 3)))]
    names = [f"x{i}" for i in range(len(shapes))]
    scope = _Scope(itertools.count(1))
    for name, shape in zip(names, shapes, strict=True):
        scope.define(name, scope.value(_numbers(shape, 0)))
    draw(_block(scope, 0))
    draw(_statements(scope, 0))
    results = ", ".join(scope.readable[-3:])
    lines = [f"def program(remat, {', '.join(names)}):", *scope.indented(), f"    return {results}", ""]
    random = any(word in line for line in lines for word in RANDOM)
    lines += [
        "def transform(f):",
        *(f"    f = {t}" for t in draw(_transforms(shapes, random))),
        "    return f",
        "",
    ]
    lines.append(f"args = [{', '.join(map(_numbers, shapes, itertools.count()))}]")
    return Example("\n".join(lines))
