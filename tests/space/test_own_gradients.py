"""Networks that write gradients by hand learn the same in a supernet, or a warning names what does not.

A network is a chain of convolutions with steps between them that change gradients: functions of
``torch.autograd.Function``, straight-through estimators, detached branches, hooks.
"""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bcnet.space.network
from bcnet.accel.fused_step.program import Unsupported, compile_program
from bcnet.errors import BcnetError
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.resize import sliced
from bcnet.supernet.gradients import PathGradients
from bcnet.supernet.supernet import Supernet

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*itself does not run at other widths"),
]
X = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Sign(torch.autograd.Function):
    """Straight-through, with a block of its own without gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        with torch.no_grad():
            return x.sign() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].clamp(-1, 1), None


class Scaled(torch.autograd.Function):
    """Computes with a size that it meets."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign() / math.sqrt(weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Reversed(torch.autograd.Function):
    """Gives back what it is given, and the negative of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Pair(torch.autograd.Function):
    """Two results, and a context that is set up apart."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x * y.detach(), x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return 2 * gradients[0] * y + gradients[1], gradients[0] * x - gradients[1]


class Twins(torch.autograd.Function):
    """The same result two times, with two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * gradients[0] - gradients[1]


class Filled(torch.autograd.Function):
    """Writes to a tensor of its own what it then reads and overwrites: no gradient of autograd's could be had."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = torch.zeros_like(x).unsqueeze(0).repeat(2, 1, 1, 1, 1)
        kept[0] = x
        for _ in range(2):
            kept[1] = 2 * kept[0]
            kept[0] = kept[1].atan()
        return kept[0] + kept[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Overwriting(torch.autograd.Function):
    """Writes to what it is given, which can be done once only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x[:, :, 1:].mul_(3)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Swish(torch.autograd.Function):
    """The gradient of autograd, for less memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach() * x.data.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradients[0] * gate * (1 + x * (1 - gate))


class Convolved(torch.autograd.Function):
    """Reads a layer past its arguments, as reversible networks do, with half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Conv2d, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.layer(leaf), [leaf, *ctx.layer.parameters()], gradients[0] / 2)
        return found[0], None, *found[1:]


reverse = Reversed.apply  # bound before anything is traced


def straight_through(x: Tensor, layer: nn.Conv2d) -> Tensor:
    return layer(x + (x.round() - x).detach())


def hooked(x: Tensor, layer: nn.Conv2d) -> Tensor:
    y = layer(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)
    return y


def without_gradients(x: Tensor, layer: nn.Conv2d) -> Tensor:
    with torch.no_grad():
        mask = layer(x).sigmoid()
    return x * mask + layer(x)


STEPS = {
    "plain": lambda x, layer: F.relu(layer(x)),
    "sign": lambda x, layer: layer(Sign.apply(x, 0.5)),
    "binary": lambda x, layer: F.conv2d(x, Sign.apply(layer.weight, 2.0), layer.bias, padding=1),
    "scaled": lambda x, layer: F.conv2d(x, Scaled.apply(layer.weight), layer.bias, padding=1),
    "reversed": lambda x, layer: layer(reverse(x) + x.relu()),
    "pair": lambda x, layer: sum(Pair.apply(x, layer(x))),
    "twins": lambda x, layer: layer(torch.lerp(*Twins.apply(x), 0.25)),
    "chained": lambda x, layer: layer(Swish.apply(Reversed.apply(Filled.apply(x)))),
    "filled": lambda x, layer: layer(Filled.apply(x)),
    "overwriting": lambda x, layer: layer(Overwriting.apply(x + 1)),
    "swish": lambda x, layer: Swish.apply(layer(x)),
    "straight through": straight_through,
    "detached": lambda x, layer: layer(x.detach()) + layer(x.relu()),
    "stopped": lambda x, layer: layer(x.data),
    "without gradients": without_gradients,
    "hooked": hooked,
    "convolved": lambda x, layer: Convolved.apply(x, layer, *layer.parameters()),
}
LOST = {"hooked", "convolved", "overwriting"}


class Network(nn.Module):
    def __init__(self, steps: list[str]):
        super().__init__()
        self.stem, self.steps = nn.Conv2d(3, 8, 3, padding=1), steps
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in steps)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for step, layer in zip(self.steps, self.layers, strict=True):
            x = STEPS[step](x, layer)
        return self.head(F.silu(x).mean((2, 3)))


def traced(model: nn.Module) -> tuple[NetworkSpace, str]:
    """The space, and the warning about gradients."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        space = trace(model, X, groups=4)
    told = [str(w.message) for w in caught if "has gradients of its own" in str(w.message)]
    return space, told[0] if told else ""


def gradients(network: nn.Module) -> dict[str, Tensor]:
    network.eval()(X).square().sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in network.named_parameters()}


def of_a_path(space: NetworkSpace, net: Supernet, widths: Any) -> dict[str, Tensor]:
    """The gradients that a path adds to its parameters, cut to these."""
    selection, runner = net.select(widths), PathGradients(net)
    runner.zero()
    leaves = runner.leaves(selection)
    runner.backward(net.run(selection, X, leaves).square().sum(), [(selection, leaves)])
    axes = space.coupling.axes
    return {
        name: sliced(p.grad, axes[name], selection.units, net.total_units, "left") if name in axes else p.grad
        for name, p in net.named_parameters()
        if p.grad is not None
    }


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {name for name in a if not torch.allclose(a[name], b[name], rtol=1e-6, atol=1e-9)}


def held(space: NetworkSpace, model: nn.Module) -> Supernet:
    """A supernet with the weights of the original."""
    net = Supernet(space, "ua")
    net.load_state_dict(model.state_dict())
    return net


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=4))
@example(["sign", "plain", "hooked"])
@example(["binary", "scaled", "reversed"])
@example(["twins"])
@example(["filled", "plain"])
@example(["chained"])
@example(["plain", "overwriting"])
@example(["pair", "swish", "convolved"])
@example(["plain", "stopped", "without gradients", "sign"])
def test_a_path_learns_as_its_network_or_a_warning_names_it(steps: list[str]) -> None:
    torch.manual_seed(0)
    model = Network(steps).double()
    space, told = traced(model)
    net, own = held(space, model), gradients(model)
    lost = differing(own, of_a_path(space, net, space.max))
    if told:
        name, number, of = re.search(r": (\S+), the first of (\d+) such parameters of (\d+),", told).groups()
        assert (name, int(number), int(of)) == (next(n for n in own if n in lost), len(lost), len(own))
        assert set(steps) & LOST
        kept = gradients(space.build(space.max, weights_of=model))
        assert differing(own, kept) == (set() if space.own_class else lost)
    else:
        assert not lost
        assert not differing(gradients(space.build(space.min, weights_of=net)), of_a_path(space, net, space.min))


def test_the_warning_says_what_to_do() -> None:
    _, told = traced(Network(["hooked"]).double())
    assert told == (
        "Network has gradients of its own that its graph has not (a hook, a torch.autograd.Function that reads weights "
        "past its arguments, or another forward in training): stem.weight, the first of 4 such parameters of 6, learns "
        "otherwise in a supernet than in Network itself; write that part with plain operators, or slim the trained "
        "network without a supernet (start: trained, score: steps or cut)"
    )


class Spied(Network):
    """Notes how often it is run with gradients."""

    runs: list[bool] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(torch.is_grad_enabled() and type(x) is Tensor)
        return super().forward(x)


def test_large_networks_are_compared_where_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcnet.space.network, "QUICK", 0)
    for steps, compared in ((["plain"], 0), (["sign"], 1), (["hooked"], 1)):
        Spied.runs.clear()
        _, told = traced(Spied(steps).double())
        assert sum(Spied.runs) == compared
        assert bool(told) == (steps == ["hooked"])
    listened = Network(["plain"]).double()
    listened.layers[0].register_full_backward_hook(lambda module, before, after: (2 * before[0],))
    assert ": stem.weight, the first of 2 such parameters of 6, learns" in traced(listened)[1]


def test_a_hook_of_a_parameter_is_told() -> None:
    model = Network(["plain"]).double()
    model.layers[0].weight.register_hook(lambda gradient: 2 * gradient)
    assert ": layers.0.weight, the first of 1 such parameters of 6, learns" in traced(model)[1]


def test_values_are_those_of_the_operators() -> None:
    """A function that computes with the sizes it meets: what is cut is the original with zeros all the same."""
    torch.manual_seed(0)
    model = Network(["scaled"]).double().eval()
    space, told = traced(model)
    widths = space.max - 2
    cut = space.build(widths, weights_of=model).eval()
    with torch.no_grad():
        for layer, (outputs, inputs) in zip(
            (model.stem, model.layers[0], model.head), ((6, 3), (6, 6), (5, 6)), strict=True
        ):
            layer.weight[outputs:] = 0
            layer.weight[:, inputs:] = 0
            layer.bias[outputs:] = 0
    assert not told
    assert space.names == ("stem", "layers.0")
    torch.testing.assert_close(cut(X), model(X))
    torch.testing.assert_close(held(space, model)(X, widths), cut(X))


def test_the_fused_step_leaves_such_networks_to_autograd() -> None:
    for steps in (["sign"], ["hooked"]):
        with pytest.raises(Unsupported, match=r"^it has gradients of its own$"):
            compile_program(traced(Network(steps).double())[0])


class Parted(torch.autograd.Function):
    """Is told a size, which it cannot do with at other widths."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int) -> Tensor:
        return x.view(-1, channels, x.shape[2], x.shape[3]).sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def test_a_function_that_does_not_run_at_other_widths_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS, "parted", lambda x, layer: layer(Parted.apply(x, 8)))
    with pytest.raises(BcnetError, match=r"^Parted of Network does not run at other widths: .*; give a torch.aut"):
        trace(Network(["parted"]).double(), X)
