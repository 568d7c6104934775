"""Networks at other widths: equal to the original where they must be, plain modules in every other way."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from held import zeroed
from test_coupling import three_widths
from tiny_networks import NETWORKS, Tiny, X, conv, tiny, traced
from torch import Tensor, fx, nn

from bcnet.errors import BcnetError
from bcnet.space.network import trace

# Where a dropped channel is not the same as a channel of zeros: norms and attention over channels see how many there
# are, a standardised weight too, a shuffle moves the others, and a channel's neighbours change at the cut.
NOT_ZEROS = {
    "LayerScale", "GroupNormed", "GroupDeviation", "Standardized", "Attention", "ChannelAttention"
}  # fmt: skip
SIDES = ("left", "right")
pytestmark = pytest.mark.filterwarnings("ignore:UnequalChunks itself does not run")


@pytest.mark.parametrize("name", NETWORKS)
def test_full_width_is_the_original(name: str) -> None:
    model, space = traced(name)
    for side in SIDES:
        network = space.build(space.max, weights_of=model, side=side).eval()
        assert torch.equal(network(X), model(X))


@pytest.mark.parametrize("name", sorted(set(NETWORKS) - NOT_ZEROS))
@pytest.mark.parametrize("side", SIDES)
def test_slices_are_the_original_with_zeros(name: str, side: str) -> None:
    model, space = traced(name)
    for widths in three_widths(space):
        network = space.build(widths, weights_of=model, side=side).eval()
        expected = zeroed(model, space, widths, side)(X)
        torch.testing.assert_close(network(X), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted(set(NETWORKS) - {"UnequalChunks"}))
def test_own_class_and_graph_agree(name: str) -> None:
    model, space = traced(name)
    assert space.own_class
    other = copy.copy(space)
    other._own_class = False
    for widths in three_widths(space):
        own, graph = (s.build(widths, weights_of=model).eval() for s in (space, other))
        assert type(own) is type(model)
        assert set(own.state_dict()) == set(graph.state_dict())
        torch.testing.assert_close(own(X), graph(X), rtol=1e-10, atol=1e-10)
        assert graph(X[:1]).shape == (1, 5)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_trains(name: str) -> None:
    _, space = traced(name)
    for widths in three_widths(space):
        network = space.build(widths)
        outputs = network(X)
        sum(t.square().sum() for t in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_a_plain_module(name: str) -> None:
    """Its state survives, torch.export and bcnet take it again, torch.compile too."""
    model, space = traced(name)
    widths = three_widths(space)[1]
    network = space.build(widths, weights_of=model).eval()
    twin = space.build(widths).eval()
    twin.load_state_dict(network.state_dict())
    assert torch.equal(twin(X), network(X))
    exported = torch.export.export(network, (X,)).module()
    torch.testing.assert_close(exported(X), network(X), rtol=1e-12, atol=1e-12)
    compiled = torch.compile(network, backend="eager")
    torch.testing.assert_close(compiled(X), network(X), rtol=1e-12, atol=1e-12)
    torch.compiler.reset()


def test_a_resized_network_can_be_traced_again() -> None:
    space = trace(tiny("Residual"), X)
    again = trace(space.build([6, 5]), X)
    assert [v.max for v in again.variables] == [6, 5]


class StaticSizes(Tiny):
    """A forward with the channels written into it as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = conv(12, 12)

    def body(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        return self.out(x.view(n, 2, 6, 8, 8).transpose(1, 2).reshape(n, 12, 8, 8))


def test_a_forward_that_allows_no_other_widths_becomes_its_graph() -> None:
    model = StaticSizes().double().eval()
    space = trace(model, X)
    sentence = (
        r"^StaticSizes itself does not run at other widths \(shape '.*' is invalid for input of size \d+\), so "
        r"networks are built from its exported graph: plain layers under the same names, without its Python code$"
    )
    with pytest.warns(UserWarning, match=sentence):
        assert not space.own_class
    for widths in three_widths(space):
        network = space.build(widths)
        network(X).sum().backward()
        assert set(network.state_dict()) == set(model.state_dict())
        assert network.eval()(X[:1]).shape == (1, 5)
        params = sum(p.numel() for p in network.parameters())
        assert params == space.costs["params"](widths)[0]
    assert torch.equal(space.build(space.max, weights_of=model).eval()(X), model(X))


def test_a_graph_draws_fresh_weights_and_not_those_of_the_network() -> None:
    """Else a trained network would be what training from scratch begins with."""
    model = StaticSizes().double().eval()
    space = trace(model, X)
    space._own_class = False
    drawn = [space.build(space.max) for _ in range(2)]
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            one, other = (network.get_parameter(f"{name}.weight") for network in drawn)
            assert not torch.isclose(one, module.weight).any()
            assert not torch.isclose(one, other).any()
            torch.testing.assert_close(one.std(), module.weight.std(), rtol=0.3, atol=0.0)


def test_chunks_that_lose_their_pattern_become_a_graph() -> None:
    _, space = traced("UnequalChunks")
    assert not space.own_class
    assert type(space.build(space.min)).__name__ == "GraphNetwork"


def _torchs_own_names() -> list[str]:
    own = fx.GraphModule(nn.Module(), fx.Graph())
    return sorted(name for name in set(dir(own)) - set(dir(nn.Module())) if not name.startswith("__"))


@pytest.mark.parametrize("name", _torchs_own_names())
def test_layers_called_as_what_torch_has_itself_work_or_are_named(name: str) -> None:
    model = nn.Sequential()
    model.add_module(name, nn.Conv2d(3, 8, 3))
    model.append(nn.Conv2d(8, 4, 1)).double()
    if name == "code":
        assert trace(model, X).own_class
    else:
        with pytest.raises(BcnetError, match=f"cannot have a part called '{name}': rename it in the model"):
            trace(model, X)
        renamed = nn.Sequential(*model.children())
        assert len(trace(renamed, X).variables) == 1


def test_a_graph_follows_training_mode() -> None:
    """Batch norm of a network built from a graph takes statistics of the batch, and records them."""
    model = StaticSizes().double()
    space = trace(model, X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = space.build(space.max, weights_of=model)
    assert torch.allclose(network.train()(X), model.train()(X))
    found, expected = network.state_dict(), model.state_dict()
    assert torch.allclose(found["stem.1.running_mean"], expected["stem.1.running_mean"])
    assert torch.allclose(network.eval()(X), model.eval()(X))


def test_tied_parameters_stay_tied() -> None:
    _, space = traced("SharedWeights")
    network = space.build(space.min)
    assert network.left.weight is network.right.weight


def test_layers_know_their_sizes() -> None:
    network = traced("NarrowGroups")[1].build([6])
    layer, norm = network.grouped[0], network.grouped[1]
    assert (layer.in_channels, layer.out_channels, layer.groups) == (6, 6, 3)
    assert (norm.num_features, network.head.in_features) == (6, 6)
    network = traced("UnequalSplit")[1].build([5, 3, 2, 1])
    assert network.sizes == (5, 3)
    network = traced("Remembered")[1].build([2, 5, 3])
    assert (network.shape, network.touched, network.untouched) == ((7, 1, 1), 2, 5)
    network = traced("LayerScale")[1].build([7, 9])
    assert network.norm.normalized_shape == (7,)
    assert network.gamma.shape == (7,)


def test_fresh_weights_are_drawn_as_the_layers_draw_them() -> None:
    """A convolution of fewer inputs draws wider weights; a bare parameter starts as it did."""
    model = tiny("LayerScale")
    space = trace(model, X)
    torch.manual_seed(3)
    network = space.build([4, 20])
    bound = 1 / np.sqrt(4)
    assert float(network.expand.weight.detach().abs().max()) <= bound
    assert float(network.expand.weight.detach().abs().max()) > 0.9 * bound
    assert torch.equal(network.gamma, torch.full((4,), 0.5, dtype=torch.float64))
    assert torch.equal(network.stem[1].running_mean, torch.zeros(4, dtype=torch.float64))


def test_init_is_called_on_fresh_networks_only() -> None:
    model = tiny("Residual")
    seen: list[nn.Module] = []
    space = trace(model, X, init=seen.append)
    fresh = space.build(space.min)
    space.build(space.min, weights_of=model)
    assert seen == [fresh]


def test_weights_of_another_network() -> None:
    space = trace(tiny("Residual"), X)
    sentence = r"^weights_of has no parameter 'inner.0.weight': it must be the traced network or its supernet$"
    with pytest.raises(BcnetError, match=sentence):
        space.build(space.min, weights_of=tiny("Gated"))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_converted_after_it_was_traced(name: str) -> None:
    """As one that is moved to a GPU is: networks are built as it is now."""
    model, space = traced(name)
    single = copy.copy(space)
    single.model, single._own_class = copy.deepcopy(model).float(), None
    for widths in three_widths(space):
        network = single.build(widths, weights_of=single.model).eval()
        expected = space.build(widths, weights_of=model).eval()(X)
        torch.testing.assert_close(network(X.float()).double(), expected, rtol=1e-3, atol=1e-3)
    assert single.example[0].dtype == torch.float32
    assert space.example[0].dtype == torch.float64


class AddsSingle(Tiny):
    """Adds a constant in single precision, which no other precision bears."""

    def body(self, x: Tensor) -> Tensor:
        return x + torch.zeros(1)


def test_a_network_that_cannot_be_converted_after_it_was_traced() -> None:
    model = AddsSingle()
    space = trace(model, X.float())
    model.bfloat16()
    with pytest.raises(BcnetError, match=r"was moved or converted after it was traced.*trace it again as it is now"):
        space.build(space.min)
