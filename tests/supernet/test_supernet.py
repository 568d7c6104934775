"""A path of a supernet is the plain network of the same widths, weights and side: outputs and gradients."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, Concat, Grouped, example
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bcnet.errors import BcnetError
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.widths import Side, Widths
from bcnet.supernet.gradients import PathGradients
from bcnet.supernet.principle import PRINCIPLES
from bcnet.supernet.supernet import Supernet

NAMES = [principle.name for principle in PRINCIPLES]


pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*itself does not run at other widths"),
]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@cache
def space_of(name: str) -> NetworkSpace:
    torch.manual_seed(0)
    return trace(ARCHITECTURES[name]().double(), example(name), groups=4, base=2)


@cache
def supernet_of(name: str) -> Supernet:
    return Supernet(space_of(name))


def some_widths(space: NetworkSpace) -> list[Widths]:
    return [space.min, space.sample(np.random.default_rng(len(space)))[0], space.max]


def randomised(net: Supernet) -> Supernet:
    """Affine parameters and biases that differ from channel to channel."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter))
    return net


def as_weights(net: Supernet, space: NetworkSpace, widths: Widths, side: Side) -> dict[str, Tensor]:
    """The supernet's gradients, cut as the weights of the plain network are."""
    holder = copy.deepcopy(net)
    with torch.no_grad():
        for mine, source in zip(holder.parameters(), net.parameters(), strict=True):
            mine.copy_(torch.zeros_like(mine) if source.grad is None else source.grad)
    return dict(space.build(widths, weights_of=holder, side=side).named_parameters())


def close(found: Tensor, wanted: Tensor) -> None:
    atol = 1e-8 * float(wanted.detach().abs().max()) + 1e-14
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=atol)


@pytest.mark.parametrize("principle", NAMES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_path_is_the_plain_network(name: str, principle: str) -> None:
    space = space_of(name)
    net = randomised(Supernet(space, principle))
    gradients = PathGradients(net)
    x = example(name)
    for widths in some_widths(space):
        for side in net.sides:
            plain = space.build(widths, weights_of=net, side=side)
            expected = plain(x)
            cotangent = torch.randn_like(expected)
            (expected * cotangent).sum().backward()

            net.zero_grad()
            found = net(x, widths, side)
            close(found, expected)
            (found * cotangent).sum().backward()
            cut = as_weights(net, space, widths, side)
            for key, parameter in plain.named_parameters():
                assert parameter.grad is not None
                close(cut[key], parameter.grad)
            assert_nothing_else(net, plain)

            whole = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
            selection = net.select(widths, side)
            gradients.zero()
            leaves = gradients.leaves(selection)
            output = net.run(selection, x, leaves)
            gradients.backward((output * cotangent).sum(), [(selection, leaves)])
            for parameter, wanted in zip(net.parameters(), whole, strict=True):
                assert parameter.grad is not None
                close(parameter.grad, torch.zeros_like(parameter) if wanted is None else wanted)


def assert_nothing_else(net: Supernet, plain: nn.Module) -> None:
    """Channels outside of the path have no gradient."""
    inside = sum(float(p.grad.abs().sum()) for p in plain.parameters() if p.grad is not None)
    everywhere = sum(float(p.grad.abs().sum()) for p in net.parameters() if p.grad is not None)
    assert everywhere == pytest.approx(inside, rel=1e-9)


@pytest.mark.parametrize("name", ["channel_bench_mobilenet", "grouped", "flat", "layer_norm"])
def test_plain_slices_copy_nothing(name: str) -> None:
    """Every view and every leaf lies in its parameter's own memory, also with channels last."""
    net = Supernet(space_of(name)).to(memory_format=torch.channels_last)
    gradients = PathGradients(net)
    for widths in some_widths(net.space):
        for side in net.sides:
            selection = net.select(widths, side)
            for whole, view, leaf in zip(net.state(), net.views(selection), gradients.leaves(selection), strict=True):
                assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                assert leaf.data_ptr() == view.data_ptr()


def test_only_channels_that_lie_apart_are_gathered() -> None:
    space = space_of("concat")
    net = Supernet(space)
    selection = net.select(space.min)
    copied = [
        name
        for name, whole, view in zip(net._graph.names, net.state(), net.views(selection), strict=True)
        if view.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    ]
    assert sorted({name for name in copied if "running" not in name}) == [
        "c.0.weight",
        "head.2.weight",
        "norm.bias",
        "norm.weight",
    ]


@pytest.mark.parametrize("principle", NAMES)
def test_it_holds_the_total_under_the_original_names(principle: str) -> None:
    space = space_of("channel_bench_mobilenet")
    net = Supernet(space, principle)
    assert set(dict(net.named_parameters())) == set(dict(space.model.named_parameters()))
    totals = {v.name: net.principle.total(v) for v in space.variables}
    shapes = {name: p.shape for name, p in net.named_parameters()}
    for variable in space.variables:
        for layer in variable.layers:
            if f"{layer}.weight" in shapes:
                assert totals[variable.name] in shapes[f"{layer}.weight"][:2]


def test_ua_has_one_side() -> None:
    space = space_of("grouped")
    net = Supernet(space, "ua")
    x = example("grouped")
    assert torch.equal(net(x, space.min, "right"), net(x, space.min, "left"))


def test_gradients_of_several_paths_add_up() -> None:
    space = space_of("concat")
    net = Supernet(space)
    gradients, x = PathGradients(net), example("concat")
    paths = [(space.min, "left"), (space.max, "right"), (space.min, "right")]
    losses = [net(x, widths, side).square().mean() for widths, side in paths]  # type: ignore[arg-type]
    torch.stack(losses).sum().backward()
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    gradients.zero()
    kept = [p.grad for p in net.parameters()]
    runs = [(selection := net.select(widths, side), gradients.leaves(selection)) for widths, side in paths]  # type: ignore[arg-type]
    total = torch.stack([net.run(selection, x, leaves).square().mean() for selection, leaves in runs]).sum()
    gradients.backward(total, runs)
    for parameter, gradient, sum_ in zip(net.parameters(), kept, wanted, strict=True):
        assert parameter.grad is gradient
        assert gradient is not None
        close(gradient, sum_)


class Scaled(Concat):
    """With a number that is learnt, which no width varies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("name", [*ARCHITECTURES, "scaled"])
def test_paths_of_one_loss_and_of_losses_of_their_own_have_the_same_gradients(name: str) -> None:
    """Also where paths share a parameter as a whole, or a slice."""
    torch.manual_seed(0)
    x = example("concat" if name == "scaled" else name)
    space = trace(Scaled().double(), x, groups=4, base=2) if name == "scaled" else space_of(name)
    net = randomised(Supernet(space))
    gradients = PathGradients(net)
    paths = [net.select(widths, side) for widths in (space.max, space.min) for side in net.sides]
    found = []
    for together in (True, False):
        gradients.zero()
        runs = [(selection, gradients.leaves(selection)) for selection in paths]
        losses = [net.run(selection, x, leaves).square().mean() for selection, leaves in runs]
        if together:
            gradients.backward(torch.stack(losses).sum(), runs)
        else:
            for loss, run in zip(losses, runs, strict=True):
                gradients.backward(loss, [run])
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        if one is not None:
            close(one, other)


@pytest.mark.parametrize("name", ["concat", "grouped"])
def test_gradients_go_where_the_parameters_are(name: str) -> None:
    """Slices are remembered: not of gradients that were thrown away, nor of weights that lie elsewhere by now."""
    net = randomised(Supernet(space_of(name)))
    gradients, x = PathGradients(net), example(name)
    selection = net.select(net.space.sample(np.random.default_rng(1))[0], net.sides[-1])

    def learnt() -> list[Tensor]:
        gradients.zero()
        leaves = gradients.leaves(selection)
        gradients.backward(net.run(selection, x, leaves).square().sum(), [(selection, leaves)])
        return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in net.parameters()]

    def moved() -> None:
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()

    first = learnt()
    assert any(gradient.any() for gradient in first)
    for change in (lambda: None, lambda: net.zero_grad(set_to_none=True), moved, lambda: gradients._slices.clear()):
        change()
        for now, before in zip(learnt(), first, strict=True):
            torch.testing.assert_close(now, before, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    assert not all(torch.equal(now, before) for now, before in zip(learnt(), first, strict=True))


def test_no_more_slices_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcnet.supernet.gradients.MOST", 10)
    net = Supernet(space_of("concat"))
    gradients = PathGradients(net)
    for widths in net.space.sample(np.random.default_rng(0), 20):
        for side in net.sides:
            gradients.leaves(net.select(widths, side))
            assert len(gradients._slices) <= 10


def test_frozen_parameters_stay() -> None:
    torch.manual_seed(0)
    model = Grouped().double()
    model.stem.requires_grad_(False)
    net = Supernet(trace(model, example("grouped"), groups=4))
    gradients, x = PathGradients(net), example("grouped")
    gradients.zero()
    selection = net.select(net.space.max)
    leaves = gradients.leaves(selection)
    gradients.backward(net.run(selection, x, leaves).sum(), [(selection, leaves)])
    assert {name.split(".")[0] for name, p in net.named_parameters() if p.grad is None} == {"stem"}


def test_statistics_are_those_of_the_batch() -> None:
    """They are what a plain batch norm keeps of one batch, and a path that is given them uses them."""
    space = space_of("concat")
    net, x, widths = Supernet(space), example("concat", 8), space_of("concat").min
    selection = net.select(widths, "right")
    stats = net.statistics(selection, x, net.views(selection))
    plain = space.build(widths, weights_of=net, side="right").train()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    plain(x)
    kept = dict(plain.named_buffers())
    assert stats.keys() == {name for name in kept if "running" in name}
    for name, value in stats.items():
        close(value, kept[name])
    other = example("concat", 5)
    for mode in (True, False):
        net.train(mode)
        close(net(other, widths, "right", stats), plain.eval()(other))
    for name, value in stats.items():
        close(value, kept[name])


def test_dropout_follows_the_mode() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 14 * 14, 2)).double()
    net, x = Supernet(trace(model, example("flat"), groups=2)), example("flat")
    net.train()
    assert not torch.equal(net(x, net.space.max), net(x, net.space.max))
    net.eval()
    assert torch.equal(net(x, net.space.max), net(x, net.space.max))


def test_bad_requests_say_what_is_wrong() -> None:
    space = space_of("concat")
    net = Supernet(space)
    x = example("concat")
    for widths, side, message in (
        (np.stack([space.min, space.max]), "left", "a path takes the widths of one network, a row of numbers"),
        (space.max, "middle", "side is 'middle', but it must be left or right"),
        ([1], "left", f"this space has {len(space)} width variables, but 1 widths were given"),
    ):
        with pytest.raises(BcnetError) as error:
            net(x, widths, side)
        assert str(error.value) == message
    with pytest.raises(BcnetError, match=r"^unknown principle 'bcv3': did you mean"):
        Supernet(space, "bcv3")


@given(st.data())
def test_a_selection_is_the_same_however_widths_are_given(data: st.DataObject) -> None:
    """Those of candidates are looked up, others are checked."""
    space = space_of("concat")
    net = supernet_of("concat")
    widths = [data.draw(st.integers(1, v.max // v.unit)) * v.unit for v in space.variables]
    side: Side = data.draw(st.sampled_from(["left", "right"]))
    units = tuple(width // v.unit for width, v in zip(widths, space.variables, strict=True))
    for given_as in (widths, tuple(widths), np.array(widths), np.array(widths, dtype=float), torch.tensor(widths)):
        selection = net.select(given_as, side)
        assert selection == net.select(space.check(widths), side)
        assert (selection.units, selection.side) == (units, side)
        assert all(type(unit) is int for unit in selection.units)


def test_it_moves_and_copies_as_a_module_does() -> None:
    space = space_of("concat")
    net = Supernet(space)
    twin = copy.deepcopy(net)
    x = example("concat")
    before = net(x, space.min)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(net(x, space.min), before)
    assert not torch.equal(twin(x, space.min), before)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(x, space.min), before)
    single = net.float()
    assert single(x.float(), space.min).dtype == torch.float32


def test_concat_module_runs_as_written() -> None:
    """At full widths under a principle without extra channels the supernet is the original."""
    torch.manual_seed(0)
    model, x = Concat().double(), example("concat")
    space = trace(model, x, groups=4)
    net = Supernet(space, "ua")
    net.load_state_dict(model.state_dict())
    close(net(x, space.max), model.train()(x))


def test_layers_may_be_called_as_what_it_has_itself() -> None:
    own = vars(Supernet(space_of("concat"))).keys() - vars(nn.Module()).keys() - {"_graph"}  # which torch.fx has, too
    x = torch.randn(2, 3, 8, 8)
    for name in sorted(own):
        network = nn.Sequential()
        for layer, part in (("stem", nn.Conv2d(3, 8, 3)), (name, nn.Conv2d(8, 8, 3)), ("head", nn.Conv2d(8, 4, 1))):
            network.add_module(layer, part)
        space = trace(network, x)
        net = randomised(Supernet(space))
        close(net(x, space.min), space.build(space.min, weights_of=net)(x))
