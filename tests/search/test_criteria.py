"""Widths allotted by importance: within every budget, above the floor, and nothing left that would still fit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import chain
from torch import nn

from bcnet import models as zoo
from bcnet.errors import BcnetError
from bcnet.search.constraints import Constraints
from bcnet.search.criteria import ALLOTMENTS, allot, find_allotment
from bcnet.space.importance import importance, kinds, taylor
from bcnet.space.network import NetworkSpace, trace
from bcnet.space.widths import WidthSpace, WidthVariable

BUDGETS = ["flops", "params", "memory"]


def scores_of(space: WidthSpace, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random(v.max // v.unit) * rng.choice([0.1, 1.0, 3.0]) for v in space.variables]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(2, 6),
    shares=st.dictionaries(st.sampled_from(BUDGETS), st.integers(40, 120), min_size=1),
)
def test_all_budgets_hold_and_nothing_more_fits(seed: int, length: int, shares: dict[str, int]) -> None:
    space, costs = chain(length)
    constraints = Constraints(space, costs, [f"{name}={share}%" for name, share in shares.items()])
    scores = scores_of(space, seed)
    widths = allot(constraints, scores)
    assert constraints.feasible(widths[None])[0]
    assert (widths >= space.min).all()
    for v in range(length):
        wider = widths + np.eye(length, dtype=np.int64)[v]
        assert widths[v] == space.max[v] or not constraints.feasible(wider[None])[0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.integers(10, 90))
def test_one_threshold_divides_the_whole_network(seed: int, share: int) -> None:
    """Without filling the rest: where every channel costs the same, what stays is what scores highest."""
    space = WidthSpace([WidthVariable(f"v{i}", tuple(range(1, 21))) for i in range(3)])
    constraints = Constraints(space, {"params": lambda widths: np.atleast_2d(widths).sum(axis=1)}, [f"params={share}%"])
    scores = scores_of(space, seed)
    widths = allot(constraints, scores)
    assert widths.sum() == 60 * share // 100
    stay = [np.sort(row)[::-1][:w] for row, w in zip(scores, widths, strict=True)]
    gone = [np.sort(row)[::-1][w:] for row, w in zip(scores, widths, strict=True)]
    above_floor = np.concatenate([row[1:] for row in stay])
    assert above_floor.min(initial=np.inf) >= np.concatenate(gone).max(initial=0)


def test_equal_scores_are_spread_evenly() -> None:
    space, costs = chain(3)
    constraints = Constraints(space, costs, ["params=50%"])
    widths = allot(constraints, [np.ones(24)] * 3)
    assert widths.max() - widths.min() <= 1


def test_local_is_the_widest_uniform_scaling() -> None:
    space, costs = chain(4)
    constraints = Constraints(space, costs, ["flops=40%", "memory=70%"])
    widths = allot(constraints, [], "local")
    assert len(set(widths.tolist())) == 1
    assert constraints.feasible(widths[None])[0]
    assert not constraints.feasible(widths[None] + 1)[0]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), share=st.integers(15, 90), of=st.lists(st.integers(0, 2), min_size=5, max_size=5)
)
def test_every_kind_keeps_the_same_share(seed: int, share: int, of: list[int]) -> None:
    """Where every channel costs the same: within a kind the highest scores stay, whatever other kinds' scores are."""
    space = WidthSpace([WidthVariable(f"v{i}", tuple(range(1, 21))) for i in range(5)])
    constraints = Constraints(space, {"params": lambda widths: np.atleast_2d(widths).sum(axis=1)}, [f"params={share}%"])
    scores = scores_of(space, seed)
    widths = allot(constraints, scores, "isomorphic", of)
    assert widths.sum() == 100 * share // 100
    for kind in set(of):
        members = [i for i in range(5) if of[i] == kind]
        floor = len(members) / (20 * len(members))
        kept = widths[members].sum() / (20 * len(members))
        assert abs(kept - max(share / 100, floor)) <= 0.1
        stay = np.concatenate([np.sort(scores[i])[::-1][1 : widths[i]] for i in members])
        gone = np.concatenate([np.sort(scores[i])[::-1][widths[i] :] for i in members])
        assert stay.min(initial=np.inf) >= gone.max(initial=0)
    scaled = [row * (10.0 if kind == 0 else 1.0) for row, kind in zip(scores, of, strict=True)]
    assert (allot(constraints, scaled, "isomorphic", of) == widths).all()


def test_kinds_are_what_layers_do() -> None:
    """MobileNetV2's hidden layers are of one kind; its streams are where equally many blocks add to them."""
    _, space = network()
    found = {v.name: kind for v, kind in zip(space.variables, kinds(space), strict=True)}
    assert len({kind for name, kind in found.items() if "expand" in name}) == 1
    streams = {stage: found[f"stage{stage}.0.body.project.conv"] for stage in range(1, 8)}
    of_equal_length = [{1, 7}, {2}, {3, 5, 6}, {4}]
    assert [{s for s in streams if streams[s] == kind} for kind in dict.fromkeys(streams.values())] == of_equal_length
    assert found["head.conv"] not in streams.values()


@cache
def network() -> tuple[nn.Module, NetworkSpace]:
    torch.manual_seed(0)
    model = zoo.build("mobilenetv2_cifar")
    return model, trace(model, torch.randn(2, 3, 32, 32), round_to=4)


@pytest.mark.parametrize("name", ALLOTMENTS)
@pytest.mark.parametrize("budgets", [["flops=25%"], ["params=40%", "flops=50%", "memory=60%"]])
def test_every_method_fills_the_budgets_of_a_real_network(name: str, budgets: list[str]) -> None:
    model, space = network()
    constraints = Constraints(space, space.costs, budgets)
    criterion, scope = find_allotment(name)
    scores = (
        taylor(space, model, [(torch.randn(4, 3, 32, 32), torch.arange(4))], nn.functional.cross_entropy)
        if criterion == "taylor"
        else importance(space, model, criterion)
    )
    widths = allot(constraints, scores, scope, kinds(space))
    assert constraints.feasible(widths[None])[0]
    assert (widths % space.steps == 0).all()
    if scope != "local":
        assert constraints.excess(widths[None]).max() >= -0.02
        assert (widths >= space.min).all()
    slim = space.build(widths, weights_of=model, keep=scores).eval()
    assert slim(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def failure(function: object, *args: object) -> str:
    with pytest.raises(BcnetError) as raised:
        function(*args)  # type: ignore[operator]
    return str(raised.value)


def test_one_sentence() -> None:
    space, costs = chain(3)
    constraints = Constraints(space, costs, ["flops=50%"])
    assert failure(allot, constraints, []) == "scores has 0 arrays, but this space has 3 width variables"
    assert failure(allot, constraints, [np.ones(24), np.ones(24), np.full(24, np.nan)]) == (
        "the scores of variable 'v2' must be 24 finite numbers, one for each of its units"
    )
    assert failure(allot, constraints, [np.ones(24), np.ones(3), np.ones(24)]) == (
        "the scores of variable 'v1' must be 24 finite numbers, one for each of its units"
    )
    assert failure(allot, constraints, [np.ones(24)] * 3, "both") == (
        "the scope is 'both', but it must be local, global or isomorphic"
    )
    tight = Constraints(space, costs, ["flops=1K"])
    for scope in ("local", "global", "isomorphic"):
        assert failure(allot, tight, [np.ones(24)] * 3, scope, [0, 0, 0]) == failure(tight.check)
    assert failure(allot, constraints, [np.ones(24)] * 3, "isomorphic", [0, 1]) == (
        "kinds has 2 numbers, but this space has 3 width variables"
    )
    assert failure(find_allotment, "l2_global") == "unknown method 'l2_global': did you mean 'l2-global'?"
    assert failure(find_allotment, "?") == (
        "unknown method '?': there are uniform, l1-global, l2-global, "
        "bn-scale-global, taylor-global, fpgm-global, lamp-global, random-global, l1-isomorphic, l2-isomorphic, "
        "bn-scale-isomorphic, taylor-isomorphic, fpgm-isomorphic, lamp-isomorphic, random-isomorphic"
    )
