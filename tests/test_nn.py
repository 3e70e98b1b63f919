"""Modules wrapped in place: all is as before, but the forward runs again on backward."""

import abc
import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from helpers import SOME_TRANSFORMS, TRANSFORMS, UNIT, CountOps, activation, assert_same, numbers
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.utils import parametrizations

from remat import policies, remat
from remat.debug import LiveBytes
from remat.nn import RematReport, WrappedModule, apply_remat, remat_module

T = TypeVar("T")


class Block(nn.Module):
    """Has all that a module can have."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0, debug: bool = False) -> Tensor:
        """What a block does."""
        self.steps += 1
        return x + scale * torch.tanh(self.dropout(self.linear(x))).sin() + debug


class Net(nn.Module):
    def __init__(self, depth: int = 4, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def wrapped(policy: Any = None, **options: Any) -> Net:
    model = net(**options)
    apply_remat(model, Block, policy=policy)
    return model


def backward(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss, and the gradients of one backward pass."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(*args, **kwargs).square().sum()
    loss.backward()
    return loss.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


POLICIES = [None, policies.dots_saveable, policies.everything_saveable]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


# Values, recomputation, memory.


@each_policy
def test_gradients_are_those_of_the_plain_module(policy: Any) -> None:
    x = numbers(3, 4)
    torch.testing.assert_close(backward(wrapped(policy), x), backward(net(), x), rtol=0, atol=0)


@each_policy
def test_keywords_reach_the_module(policy: Any) -> None:
    """Those that `checkpoint` has a meaning for, too."""
    scale = numbers(4, seed=1).requires_grad_()
    x = numbers(3, 4)
    torch.manual_seed(0)
    plain = Block().double()
    block = remat_module(copy.deepcopy(plain), policy=policy)
    results = []
    for module in (plain, block):
        scale.grad = None
        results.append((backward(module, x, scale=scale, debug=True), scale.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_statistics_are_updated_once() -> None:
    results = []
    for wrap in (lambda m: m, remat_module):
        torch.manual_seed(0)
        module = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double())
        results.append((backward(module, numbers(3, 4)), module.state_dict()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_each_wrapped_module_runs_twice_and_changes_its_buffers_once() -> None:
    model = wrapped()
    with CountOps() as ops:
        backward(model, numbers(3, 4))
    assert ops["tanh"] == 2 * len(model.layers)
    assert [int(layer.steps) for layer in model.layers] == [1] * len(model.layers)


@each_policy
def test_a_module_that_is_called_twice_under_autocast(policy: Any) -> None:
    def gradients(model: nn.Module, caches: bool) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=caches):
            loss = model(model(numbers(4, 8).float())).float().square().sum()
        loss.backward()
        return [p.grad for p in model.parameters()]

    plain = nn.Linear(8, 8)
    module = remat_module(copy.deepcopy(plain), policy=policy)
    # A cast that is made twice adds up its gradients in float32, not in bfloat16.
    assert_same(gradients(module, caches=True), gradients(plain, caches=policy is None))


def test_a_policy_is_kept_to() -> None:
    with CountOps() as ops:
        backward(wrapped(policies.save_ops("tanh")), numbers(3, 4))
    assert ops["tanh"] == 4
    assert ops["addmm"] == 8 + 1  # with that of the head


def deep(wrap: bool) -> nn.Module:
    """8 blocks of 8 activations."""
    model = nn.Sequential(*(nn.Sequential(*(nn.Tanh() for _ in range(8))) for _ in range(8)))
    if wrap:
        apply_remat(model, nn.Sequential)
    return model


def peak(run: Callable[[], Any]) -> float:
    """In activations."""
    with LiveBytes() as meter:
        run()
    return meter.peak / UNIT


def test_memory() -> None:
    x = activation().requires_grad_()
    assert peak(lambda: deep(wrap=False)(x).sum().backward()) > 64
    assert peak(lambda: deep(wrap=True)(x).sum().backward()) < 8 + 8 + 4


def test_in_no_grad_it_is_just_run() -> None:
    model = wrapped()
    with torch.no_grad(), CountOps() as ops:
        model(numbers(3, 4))
    assert ops["tanh"] == 4


# Transforms.


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda params, x: functional_call(model, params, (x,)).square().sum()


def functional(model: Net) -> Net:
    """Without what transforms refuse: draws, and buffers that the module writes to."""
    for layer in model.eval().layers:
        del layer.steps
        layer.steps = 0
    return model


def per_sample(model: nn.Module, x: Tensor) -> Any:
    params = {n: p.detach() for n, p in model.named_parameters()}
    return vmap(grad(loss_of(model)), in_dims=(None, 0))(params, x)


@each_policy
def test_per_sample_gradients(policy: Any) -> None:
    expected, found = (per_sample(functional(model), numbers(3, 4)) for model in (net(), wrapped(policy)))
    torch.testing.assert_close(found, expected)


def test_memory_under_transforms() -> None:
    x = activation(2)
    assert peak(lambda: vmap(grad(lambda x: deep(wrap=False)(x).sum()))(x)) > 2 * 64
    assert peak(lambda: vmap(grad(lambda x: deep(wrap=True)(x).sum()))(x)) < 2 * (8 + 8 + 8)


def test_functional_call_swaps_parameters() -> None:
    """Between the forward and the rerun, the module has its own parameters back."""
    x = numbers(3, 4)
    results = []
    for model in (net().eval(), wrapped().eval()):
        params = {n: (p.detach() + 1).requires_grad_() for n, p in model.named_parameters()}
        functional_call(model, params, (x,)).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        results.append({n: p.grad for n, p in params.items()})
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_jvp_and_second_order() -> None:
    x = numbers(3, 4)
    results = []
    for model in (functional(net()), functional(wrapped())):
        params = {n: p.detach() for n, p in model.named_parameters()}
        gradient = grad(loss_of(model), argnums=1)
        results.append(jvp(lambda x, p=params, g=gradient: g(p, x), (x,), (x.cos(),)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=str)
def test_wrapped_modules_in_a_wrapped_one(policy: Any, transform: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3))) for _ in range(2))
    )
    expected = TRANSFORMS[transform](model.double(), numbers(3, 3))
    apply_remat(model, nn.Sequential, policy=policy)
    assert_same(TRANSFORMS[transform](model, numbers(3, 3)), expected)
    assert_same(TRANSFORMS[transform](remat(lambda x: model(x)), numbers(3, 3)), expected)


def test_an_ensemble() -> None:
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(3)]
        base = copy.deepcopy(models[0]).to("meta")
        if wrap:
            for model in (*models, base):
                remat_module(model)
        params, buffers = stack_module_state(models)

        def loss(params: Any, x: Tensor, base: nn.Module = base, buffers: Any = buffers) -> Tensor:
            return vmap(lambda p, x: functional_call(base, p, (x,)), in_dims=(0, None))(params, x).square().sum()

        results.append(grad(loss)({n: p.detach() for n, p in params.items()}, numbers(3, 4)))
    torch.testing.assert_close(*results)


# All is as before.


def test_nothing_about_the_module_is_different() -> None:
    plain, model = net(), wrapped()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert repr(model) == repr(plain)
    block = model.layers[0]
    assert isinstance(block, Block)
    assert vars(block).keys() == vars(plain.layers[0]).keys()
    assert (type(block).__name__, type(block).__qualname__, type(block).__module__) == ("Block", "Block", __name__)
    assert type(block).__doc__ == Block.__doc__
    assert inspect.signature(block.forward) == inspect.signature(plain.layers[0].forward)
    assert block.forward.__doc__ == "What a block does."
    model.load_state_dict(plain.state_dict())
    assert model.eval().layers[0].training is False
    assert model.train().layers[0].dropout.training is True


def test_layers_of_one_class_share_one_class() -> None:
    """torch.compile compiles a class once."""
    model = wrapped()
    assert len({type(layer) for layer in model.layers}) == 1
    assert type(wrapped(policies.dots_saveable).layers[0]) is not type(model.layers[0])


@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle", "old pickle", "torch.save"])
@each_policy
def test_copies(way: str, policy: Any) -> None:
    def through_torch(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    made = {
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "old pickle": lambda m: pickle.loads(pickle.dumps(m, protocol=0)),
        "torch.save": through_torch,
    }[way](model := wrapped(policy))
    assert type(made.layers[0]) is type(model.layers[0])
    with CountOps() as ops:
        found = backward(made, numbers(3, 4))
    assert ops["tanh"] == (4 if policy is policies.everything_saveable else 8)
    torch.testing.assert_close(found, backward(net(), numbers(3, 4)), rtol=0, atol=0)


def test_a_state_dict_goes_through_a_file() -> None:
    file = io.BytesIO()
    torch.save(wrapped().state_dict(), file)
    file.seek(0)
    plain = net()
    nn.init.zeros_(plain.head.weight)
    plain.load_state_dict(torch.load(file))
    torch.testing.assert_close(backward(plain, numbers(3, 4)), backward(net(), numbers(3, 4)), rtol=0, atol=0)


class Reduced(nn.Module):
    """Says itself how it is pickled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()

    def __reduce__(self) -> Any:
        return Reduced, (self.linear.in_features,)


def test_a_module_that_says_how_it_is_pickled() -> None:
    module = remat_module(Reduced(3), policy=policies.dots_saveable)
    made = pickle.loads(pickle.dumps(module))
    assert type(made) is type(module)
    assert made.linear.in_features == 3


def test_hooks_of_the_module_run_once() -> None:
    model = wrapped()
    seen: list[str] = []
    block = model.layers[1]
    block.register_forward_pre_hook(lambda *_: seen.append("pre"))
    block.register_forward_hook(lambda *_: seen.append("post"))
    block.register_full_backward_pre_hook(lambda *_: seen.append("backward pre"))
    block.register_full_backward_hook(lambda *_: seen.append("backward"))
    block.linear.register_forward_hook(lambda *_: seen.append("inner"))
    x = numbers(3, 4)
    assert backward(model, x)[0] == backward(net(), x)[0]
    assert seen == ["pre", "inner", "post", "backward pre", "inner", "backward"]


def test_hooks_change_what_they_change() -> None:
    results = []
    for model in (net(), wrapped()):
        block = model.layers[1]
        block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        block.register_forward_hook(lambda module, args, out: out.sin())
        block.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
        results.append(backward(model, numbers(3, 4)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [remat, remat_module])
@pytest.mark.parametrize("of_torch", ["spectral_norm", "weight_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_hooks_that_set_a_weight_for_each_call(of_torch: str, wrap: Any) -> None:
    """A rerun finds the weight of its own call, although a later call has replaced it."""

    def gradients(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layer = wrap(getattr(nn.utils, of_torch)(nn.Linear(4, 4).double()))
        x = numbers(3, 4).requires_grad_()
        (layer(x).sin().sum() + layer(x.cos()).sum()).backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    assert_same(gradients(wrap), gradients(lambda layer: layer))


def test_parametrizations() -> None:
    results = []
    for first in (False, True):
        for wrap in (lambda m: m, remat_module):
            torch.manual_seed(0)
            module = nn.Linear(4, 4).double()
            module = parametrizations.weight_norm(wrap(module)) if first else wrap(parametrizations.weight_norm(module))
            with CountOps() as ops:
                results.append(backward(module, numbers(3, 4)))
            assert isinstance(module, nn.Linear)
            assert ops["_weight_norm_interface"] == (2 if wrap is remat_module else 1)
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_wrapping_again_changes_the_policy() -> None:
    block = Block()
    first = type(remat_module(block))
    assert type(remat_module(block)) is first
    assert type(remat_module(block, policy=policies.dots_saveable)).__mro__[1:] == Block.__mro__
    assert type(remat_module(block)) is first


@pytest.mark.parametrize("wrap", [remat, remat_module])
def test_the_class_is_not_announced_to_a_registry(wrap: Any) -> None:
    registry: dict[str, type] = {}

    class Base(nn.Module):
        def __init_subclass__(cls, *, key: str) -> None:
            super().__init_subclass__()
            registry[key] = cls

    class Layer(Base, key="layer"):
        __slots__ = ("width",)

        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    layer = Layer()
    wrapped = wrap(layer) or layer
    assert registry == {"layer": Layer}
    assert type(wrapped).__mro__[1:4] == (Layer, Base, nn.Module)
    assert_same(wrapped(numbers(3)), numbers(3).sin())


@pytest.mark.parametrize("wrap", [remat, remat_module])
@pytest.mark.parametrize("first", [abc.ABC, Generic[T]], ids=["ABC", "Generic"])
def test_the_first_base_is_no_module(wrap: Any, first: Any) -> None:
    class Layer(first, nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    layer = Layer()
    wrapped = wrap(layer) or layer
    assert isinstance(wrapped, Layer)
    assert_same(grad(lambda x: wrapped(x).sum())(numbers(3)), numbers(3).cos())


def test_classes_go_with_their_modules() -> None:
    def make() -> weakref.ref[type]:
        class Local(nn.Linear):
            pass

        return weakref.ref(type(remat_module(Local(2, 2))))

    ref = make()
    gc.collect()  # a class is a cycle
    assert ref() is None


@each_policy
def test_a_module_is_freed_with_its_last_reference(policy: Any, no_gc: None) -> None:
    model = wrapped(policy)
    backward(model, numbers(3, 4))
    per_sample(functional(model), numbers(3, 4))
    model(numbers(3, 4))
    refs = [weakref.ref(m) for m in model.modules()]
    del model
    assert [ref() for ref in refs] == [None] * len(refs)


# Memory of other kinds, other threads.


class Seen(torch.autograd.graph.save_on_cpu):
    """Notes what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        pack = self.pack_hook

        def note(tensor: Tensor) -> Any:
            self.shapes.append(tensor.shape)
            return pack(tensor)

        self.pack_hook = note


each_offload = pytest.mark.parametrize(
    "policy",
    [None, policies.offload_ops("addmm"), policies.offload_dot_with_no_batch_dims("device", "pinned_host")],
    ids=str,
)


@each_offload
def test_offloading_and_save_on_cpu(policy: Any) -> None:
    expected = backward(net(), numbers(3, 4))
    model = wrapped(policy)
    with (seen := Seen()):
        torch.testing.assert_close(backward(model, numbers(3, 4)), expected, rtol=0, atol=0)
    inputs = seen.shapes.count(torch.Size([3, 4]))
    assert inputs == len(model.layers) + 1 + 1  # of the blocks and the head, and what `square` reads


@each_offload
def test_offloading_and_save_on_cpu_of_a_decorated_function(policy: Any) -> None:
    def block(w: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(x, x, w).tanh().sin()

    def gradients(block: Callable[..., Tensor], where: Seen) -> tuple[Tensor, ...]:
        w, x = numbers(4, 4).requires_grad_(), numbers(3, 4).requires_grad_()
        with where:
            out = block(w, block(w, x)).sum()
        return torch.autograd.grad(out, (w, x))

    seen = Seen()
    expected = gradients(block, Seen())
    torch.testing.assert_close(gradients(remat(block, policy=policy), seen), expected, rtol=0, atol=0)
    assert sorted(seen.shapes) == [(3, 4), (3, 4), (4, 4), (4, 4)]  # what the two calls were given


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=str)
def test_replicas_in_threads(policy: Any) -> None:
    """What `DataParallel` does: copies of the `__dict__`s, whose parameters are results, each run in a thread."""

    def replica_of(module: nn.Module) -> nn.Module:
        replica = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            setattr(replica, name, parameter.clone())
        for name, child in module._modules.items():
            replica._modules[name] = replica_of(child)
        return replica

    model = wrapped(policy).eval()  # threads share the generator that dropout draws from
    x = numbers(6, 4)
    expected = backward(net().eval(), x)
    replicas = [replica_of(model) for _ in range(2)]
    out: list[Tensor] = [x, x]
    together = threading.Barrier(2)

    def run(i: int) -> None:
        together.wait()
        for _ in range(5):
            out[i] = replicas[i](x[3 * i : 3 * i + 3])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with CountOps() as ops:
        torch.cat(out).square().sum().backward()
    assert ops["tanh"] == 2 * len(model.layers)
    found = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(found, expected[1])


# Selection and report.


def names(report: RematReport) -> list[str]:
    return [module.name for module in report.wrapped]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (Block, ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ((Block, nn.Dropout), [f"layers.{i}{part}" for i in range(4) for part in ("", ".dropout")]),
        ("layers.*", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("layers.[13]", ["layers.1", "layers.3"]),
        ("*.*.lin*", [f"layers.{i}.linear" for i in range(4)]),
        ("head", ["head"]),
        (lambda name, module: isinstance(module, nn.Linear) and "layers" not in name, ["head"]),
        (nn.Linear, [*(f"layers.{i}.linear" for i in range(4)), "head"]),
    ],
)
def test_selection(select: Any, expected: list[str]) -> None:
    model = net()
    report = apply_remat(model, select)
    assert names(report) == expected
    assert [n for n, m in model.named_modules() if "_remat_how" in vars(type(m))] == expected
    torch.testing.assert_close(backward(model, numbers(3, 4)), backward(net(), numbers(3, 4)), rtol=0, atol=0)


@pytest.mark.parametrize(("every", "expected"), [(1, "0123"), (2, "02"), (3, "03"), (4, "0"), (9, "0")])
def test_every_nth(every: int, expected: str) -> None:
    report = apply_remat(net(), "layers.*", every=every)
    assert names(report) == [f"layers.{i}" for i in expected]
    assert report.left == tuple(f"layers.{i}" for i in range(4) if str(i) not in expected)


def test_the_report() -> None:
    report = apply_remat(net(), Block, policy=policies.dots_saveable, every=3)
    assert report.wrapped == (WrappedModule("layers.0", "Block", 20), WrappedModule("layers.3", "Block", 20))
    assert report.policy == policies.dots_saveable
    assert str(report).splitlines() == [
        "remat: wrapped 2 of 4 selected modules, policy dots_saveable",
        "  layers.0  Block  20 parameters",
        "  layers.3  Block  20 parameters",
    ]


# Errors.


def compiled() -> nn.Module:
    module = Block()
    module.forward = module.forward
    return module


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (len, TypeError, "must be an nn.Module; got builtin_function_or_method"),
        (torch.ones(2), TypeError, r"must be an nn.Module; got a tensor of shape \[2\] and dtype torch.float32\.$"),
        (nn.ModuleList([nn.Linear(2, 2)]), TypeError, "this ModuleList has no forward"),
        (compiled(), ValueError, "this Block has a forward of its own"),
        (nn.LazyLinear(2), ValueError, "this LazyLinear is lazy"),
        (parametrizations.weight_norm(remat_module(nn.Linear(2, 2))), ValueError, "is wrapped already"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_that_can_not_be_wrapped(module: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        remat_module(module)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_script_module_can_not_be_wrapped() -> None:
    with pytest.raises(TypeError, match="is a ScriptModule"):
        remat_module(torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_compiled_module_can_not_be_wrapped() -> None:
    message = "is a compiled module: wrap the module before torch.compile"
    with pytest.raises(TypeError, match=f"this OptimizedModule {message}"):
        remat_module(torch.compile(Block()))
    with pytest.raises(TypeError, match=f"0, a OptimizedModule, {message}"):
        apply_remat(nn.Sequential(torch.compile(Block())), "0")


@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        ("layer.*", ValueError, r"'layer.\*' selects none of 14 modules. Did you mean 'layers"),
        ("Linear", ValueError, r"It is the name of a class: pass the class itself, as in apply_remat\(model, Linear\)"),
        (nn.Conv2d, ValueError, "Conv2d selects none of 14 modules. Their classes are Block, Dropout, Linear"),
        (Tensor, TypeError, "select must name classes of modules; got <class 'torch.Tensor'>"),
        ((), ValueError, "selects none"),
        (3, TypeError, "select must be a class, .* got int 3"),
        (lambda m: True, TypeError, r"<lambda> can't be called as select\(name, module\)"),
        (lambda name, module: 3 + name, TypeError, "^unsupported operand"),
        ("layers", TypeError, "layers, a ModuleList, has no forward"),
        (
            nn.Linear(2, 2),
            TypeError,
            r"got a module, a Linear. Write remat_module\(module\) .*apply_remat\(model, Linear",
        ),
    ],
)
def test_bad_selections(select: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply_remat(net(), select)


def test_a_model_that_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"apply_remat: model must be an nn.Module; got type <class .*Linear'>\.$"):
        apply_remat(nn.Linear, nn.Linear)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "select"),
    [(nn.Linear(2, 2), nn.Linear), (nn.Linear(2, 2), "*"), (nn.Sequential(nn.ReLU()), (nn.Sequential, nn.Linear))],
)
def test_the_model_itself_is_not_selected(model: nn.Module, select: Any) -> None:
    with pytest.raises(ValueError, match=r"selects none .* never wraps the model itself: write remat_module\(model\)"):
        apply_remat(model, select)


def test_nothing_is_wrapped_where_something_can_not_be() -> None:
    model = net()
    with pytest.raises(TypeError, match="has no forward"):
        apply_remat(model, lambda name, module: name in ("layers", "layers.0", "head"))
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_every_has_to_be_a_positive_number(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be a positive number"):
        apply_remat(net(), Block, every=every)


def test_a_bad_policy_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="policy"):
        remat_module(Block(), policy=3)


# What a wrapped module costs: as little as a call of `checkpoint`.


class CallsItself(nn.Module):
    """A row is a matrix of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self(x[None], scale=scale)[0].sin() if x.dim() == 1 else self.layer(x).tanh() * scale


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize(
    "make", [CallsItself, lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), lambda: nn.Linear(3, 3)]
)
def test_a_wrapped_module_may_call_itself(make: Any, shape: tuple[int, ...]) -> None:
    module, x = make(), torch.ones(shape)
    options = {"scale": 2.0} if isinstance(module, CallsItself) else {}
    module(x, **options).sum().backward()
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()
    remat_module(module)
    module(x, **options).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))


# `remat(module)`, a module of its own.


class WithRemat(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.block, self.fc = remat(Block(), **options), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block(x))


def with_remat(**options: Any) -> WithRemat:
    torch.manual_seed(0)
    return WithRemat(**options).double()


@each_policy
def test_a_remat_of_a_module_registers_and_trains(policy: Any) -> None:
    model = with_remat(policy=policy)
    assert list(model.state_dict()) == [f"block.{key}" for key in Block().state_dict()] + ["fc.weight", "fc.bias"]
    assert isinstance(model.block, Block)
    expected = with_remat()
    expected.block = Block().double()
    expected.load_state_dict(model.state_dict())
    with CountOps() as ops:
        results = backward(model, numbers(2, 4))
    assert_same(results, backward(expected, numbers(2, 4)))
    assert ops["addmm"] == (3 if policy is None else 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    assert not torch.equal(model.block.linear.weight, expected.block.linear.weight)


def test_a_remat_of_a_module_has_the_very_same_tensors_and_attributes() -> None:
    module = Block()
    twin = remat(module)
    assert type(module) is Block
    assert twin.linear is module.linear
    twin.double().eval()
    assert module.linear.weight.dtype == torch.float64
    assert module.steps is twin.steps
    assert not module.training
    twin.register_forward_hook(lambda module, args, out: 2 * out)
    assert_same(module(numbers(2, 4)), twin(numbers(2, 4)))


def test_hooks_of_a_remat_of_a_module_run_once() -> None:
    module, calls = Block().double(), []
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_full_backward_hook(lambda *_: calls.append("backward"))
    remat(module)(numbers(2, 4).requires_grad_()).sum().backward()
    assert calls == ["before", "backward"]


def test_a_remat_of_a_module_under_transforms() -> None:
    model = with_remat()
    model.eval()
    plain_model = with_remat()
    plain_model.block.__class__ = Block
    plain_model.eval()

    def per_sample(model: nn.Module) -> Any:
        buffers = dict(model.named_buffers())
        params = {n: p.detach() for n, p in model.named_parameters()}
        of = grad(lambda ps, bs, x: functional_call(model, (ps, bs), (x,)).square().sum())
        return vmap(of, in_dims=(None, None, 0))(params, buffers, numbers(3, 4))

    plain_model.load_state_dict(model.state_dict())
    assert_same(per_sample(model), per_sample(plain_model))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_remat_of_a_module(copied: Callable[[Any], Any]) -> None:
    module = remat(Block().double(), static_argnames="debug")
    other = copied(module)
    assert type(other) is type(module)
    with CountOps() as ops:
        other(numbers(2, 4).requires_grad_(), debug=True).sum().backward()
    assert ops["addmm"] == 2
    assert other.steps == 1


def test_static_arguments_of_a_remat_of_a_module() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factors: list[float]) -> Tensor:
            factors.append(2.0)
            return x.sin() * factors[0]

    factors = [3.0]
    remat(Scaled(), static_argnums=1)(numbers(3).requires_grad_(), factors).sum().backward()
    assert factors == [3.0, 2.0, 2.0]  # the very same list, in the rerun too
    with pytest.raises(ValueError, match=r"static_argnums must be in \[-2, 2\) for .*x, factors.*; got 2"):
        remat(Scaled(), static_argnums=2)


def test_parametrized_modules_can_be_given_to_remat() -> None:
    module = parametrizations.weight_norm(nn.Linear(3, 3))
    remat(module)(torch.ones(2, 3)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("compiled", [functools.partial(torch.compile, backend="eager"), compiled_in_place])
def test_a_compiled_module_is_run_op_by_op(compiled: Callable[[Any], Any]) -> None:
    module = nn.Linear(3, 3)
    twin = remat(compiled(module))
    assert type(twin).__mro__[1] is nn.Linear
    assert twin.weight is module.weight
    with CountOps() as ops:
        twin(torch.ones(2, 3)).sum().backward()
    assert ops["addmm"] == 2


class Slotted(nn.Module):
    """A module with an attribute that is not in its `__dict__`."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.sin()


def test_a_module_with_slots_has_no_twin() -> None:
    module, x = Slotted(), torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"Slotted has attributes in __slots__, .* Write remat_module\(module\)"):
        remat(module)
    for fun in (remat(lambda x: module(x)), remat_module(module)):
        (g,) = torch.autograd.grad(fun(x).sum(), x)
        torch.testing.assert_close(g, 2.0 * x.cos())
