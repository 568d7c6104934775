"""MetaPruning and TAS, which learn widths or weights of their own; ``bench rank`` tests TAS's ranking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy

from bcnet.data.source import Data
from bcnet.space.cost import QuadraticCost
from bcnet.supernet.meta import MetaSupernet, train_meta
from bcnet.supernet.paths import METHODS
from bcnet.supernet.scoring import Evaluator
from bcnet.supernet.tas import Spending, WidthDistribution, train_tas

pytestmark = pytest.mark.usefixtures("one_thread")
UA = METHODS["ua"].sampling


def meta() -> MetaSupernet:
    space = toy.space()
    torch.manual_seed(0)
    return MetaSupernet(space)


def test_weights_follow_from_the_whole_width_vector() -> None:
    net = meta()
    first = next(i for i, axes in enumerate(net.axes()) if axes is not None)
    narrow, wide = (net.views(net.select([3, c]))[first] for c in (4, 8))
    assert narrow.shape == wide.shape  # of the first layer, whose width is the same
    assert not torch.equal(narrow, wide)
    x = toy.images(8)[0]
    built = net.space.build([3, 4])
    assert net(x, [3, 4]).shape == built(x).shape


def test_meta_learns_and_its_scores_tell_widths_apart() -> None:
    net = meta()
    before = Evaluator(net, [toy.images()]).measure(toy.some_widths(net)).loss
    makers = [make.weight.detach().clone() for make in net.make]
    train_meta(net, toy.source(), toy.config(UA, epochs=12, lr=0.1))
    after = Evaluator(net, [toy.images()]).measure(toy.some_widths(net)).loss
    assert (after < before - 0.1).all()
    assert len(set(after)) > 1
    assert all(not torch.equal(make.weight, old) for make, old in zip(net.make, makers, strict=True))


def test_meta_that_was_stopped_ends_as_if_it_had_not(tmp_path: Path) -> None:
    train_meta(meta(), toy.source(), toy.config(UA), folder=tmp_path / "whole")
    with pytest.raises(toy.Stopped):
        train_meta(meta(), toy.source(), toy.config(UA), folder=tmp_path / "again", progress=toy.stop_at(7))
    train_meta(meta(), toy.source(), toy.config(UA), folder=tmp_path / "again")
    toy.same(tmp_path / "again", tmp_path / "whole")


COST = QuadraticCost(5.0, np.array([1.0, 2.0]), np.array([[3.0, 4.0], [0.0, 0.5]]))


def test_expected_spending_is_that_of_all_widths_by_their_chance() -> None:
    torch.manual_seed(1)
    widths = WidthDistribution([[2, 4, 6], [3, 9]])
    with torch.no_grad():
        widths.logits[0].copy_(torch.randn(3))
        widths.logits[1].copy_(torch.randn(2))
    p, q = (logits.detach().double().softmax(0) for logits in widths.logits)
    exact = sum(
        float(p[i] * q[j]) * float(COST([a, b])[0]) for i, a in enumerate((2, 4, 6)) for j, b in enumerate((3, 9))
    )
    # COST rounds to whole numbers, so 0.5 b² is compared within a half.
    assert abs(float(Spending(COST, 1.0).expected(widths)) - exact) < 0.51


@pytest.mark.parametrize(("share", "way"), [(0.2, 1), (1.0, 0), (5.0, -1)])
def test_spending_pulls_towards_the_limit(share: float, way: int) -> None:
    widths = WidthDistribution([[2, 4, 6], [3, 9]])
    limit = share * float(COST(widths.likeliest())[0])
    loss = Spending(COST, limit).loss(widths)
    assert np.sign(float(loss)) == way
    if way:
        loss.backward()
        gradient = [logits.grad for logits in widths.logits]
        assert all(g is not None and np.sign(float(g[-1] - g[0])) == way for g in gradient)


def test_tas_comes_near_its_budget() -> None:
    net = toy.supernet("ua")
    cost: Any = net.space.costs["flops"]
    data = Data("toy", toy.source(), toy.source())
    limit = 0.4 * float(cost(net.space.max)[0])
    learnt = train_tas(net, data, toy.config(epochs=20), spending=Spending(cost, limit), rate=0.2)
    spent = float(cost(learnt.likeliest())[0]) / limit
    assert 0.5 < spent < 1.3
