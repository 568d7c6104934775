"""The bottleneck model, and the strategy that searches by it, on scores whose law is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from bcnet.search import SearchConfig, search
from bcnet.search.constraints import Constraints
from bcnet.search.predictors.bottleneck import BottleneckModel, costs_of_widening
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import Widths, WidthSpace, WidthVariable, candidates

WIDEST = (32, 48, 64, 96, 64, 48)


def space_of(widest: tuple[int, ...] = WIDEST) -> WidthSpace:
    return WidthSpace([WidthVariable(f"layer {i}", candidates(w, w)) for i, w in enumerate(widest)])


def chain_cost(length: int) -> QuadraticCost:
    """Of convolutions after one another: neighbouring widths are multiplied."""
    pairs = np.zeros((length, length))
    pairs[np.arange(length - 1), np.arange(1, length)] = 1.0
    return QuadraticCost(0.0, np.full(length, 3.0), pairs)


def constraints_of(budget: str = "flops=20%") -> Constraints:
    space = space_of()
    return Constraints(space, {"flops": chain_cost(len(space))}, [budget])


def losses(widths: Widths, needs: np.ndarray) -> np.ndarray:
    """Every layer costs in inverse proportion to its width, as much more as it ``needs`` (L,)."""
    return np.exp((needs * 8 / widths).mean(axis=-1))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.1, 4), min_size=6, max_size=6), st.integers(0, 1000))
def test_configurations_unseen_are_ranked_right(needs: list[float], seed: int) -> None:
    within, rng = constraints_of(), np.random.default_rng(seed)
    asked = within.sample_full(rng, 60)
    scores = -losses(asked, np.array(needs))
    model = BottleneckModel.fit(asked[:30], scores[:30], costs_of_widening(within))
    assert kendalltau(model.predict(asked[30:]), scores[30:]).statistic > 0.6


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.1, 4), min_size=6, max_size=6), st.integers(0, 1000), st.booleans())
def test_a_wider_layer_is_never_expected_to_cost_more(needs: list[float], seed: int, accuracies: bool) -> None:
    within, rng = constraints_of(), np.random.default_rng(seed)
    asked = within.sample_full(rng, 20)
    scores = -losses(asked, np.array(needs)) + (10 if accuracies else 0)
    model = BottleneckModel.fit(asked, scores, costs_of_widening(within))
    wider = np.minimum(asked + rng.integers(0, 4, asked.shape), within.space.max)
    assert (model.predict(wider) >= model.predict(asked) - 1e-9).all()
    best = asked[int(scores.argmax())]
    assert model.score(best) == pytest.approx(scores.max())


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.floats(0.05, 1.0))
def test_its_best_holds_the_budget_and_stays_near(seed: int, reach: float) -> None:
    within, rng = constraints_of(), np.random.default_rng(seed)
    asked = within.sample_full(rng, 20)
    scores = -losses(asked, rng.uniform(0.1, 4, 6))
    start = asked[int(scores.argmax())]
    model = BottleneckModel.fit(asked, scores, costs_of_widening(within))
    best = model.best(within, start, reach)
    assert within.feasible(best[None])[0]
    assert model.predict(best[None])[0] >= model.predict(start[None])[0]
    beyond = np.abs(np.log(best / start)) > reach + 1e-9
    assert (np.abs(best - start)[beyond] <= 1).all()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.integers(-300, 300))
def test_scores_of_any_size_are_modelled(seed: int, power: int) -> None:
    within, rng = constraints_of(), np.random.default_rng(seed)
    asked = within.sample_full(rng, 20)
    scores = (1 - losses(asked, rng.uniform(0.1, 4, 6))) * rng.choice([-1, 1], 20) * 10.0**power
    start = asked[int(scores.argmax())]
    model = BottleneckModel.fit(asked, scores, costs_of_widening(within))
    assert np.isfinite(model.predict(asked)).all()
    best = model.best(within, start, 0.3)
    assert within.feasible(best[None])[0]
    assert (np.abs(best - start)[np.abs(np.log(best / start)) > 0.3 + 1e-9] <= 1).all()


@st.composite
def few_candidates(draw: st.DrawFn) -> WidthSpace:
    """Spaces of a few variables with a few candidates, of which one may be all."""
    rows = draw(st.lists(st.sets(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=4))
    return WidthSpace([WidthVariable(f"layer {i}", tuple(sorted(row))) for i, row in enumerate(rows)])


@settings(deadline=None, max_examples=60)
@given(few_candidates(), st.floats(0, 1.2), st.sampled_from([1, 2, 5, 12]), st.sampled_from([2, 3, 6]), st.data())
def test_what_is_asked_for_holds_the_budget_and_is_asked_for_once(
    space: WidthSpace, loose: float, evaluations: int, population: int, data: st.DataObject
) -> None:
    """Also where the smallest candidates are above uniform scaling, few widths hold the budget, or scorings fail."""
    cost = chain_cost(len(space))
    least, most = (int(cost(widths[None])[0]) for widths in (space.min, space.max))
    fails = data.draw(st.integers(2, 4))
    found = search(
        space,
        lambda widths: np.nan if widths.sum() % fails == 0 else float(-(1 / widths).sum()),
        [f"flops={least + int(loose * (most - least))}"],
        {"flops": cost},
        SearchConfig(strategy="neighbours", evaluations=evaluations, population=population),
        initial=data.draw(st.sampled_from([None, space.max[None]])) if space.size > evaluations else None,
    )
    assert all(trial.feasible for trial in found.trials)
    assert found.hits <= population  # a first generation may hold the same widths twice
    assert (found.best is None) == all(trial.score is None for trial in found.trials)


@pytest.mark.parametrize("extreme", ["min", "max"])
def test_a_search_ends_where_only_one_network_fills_the_budget(extreme: str) -> None:
    space, cost = space_of((64,) * 12), chain_cost(12)
    widths = getattr(space, extreme)
    found = search(
        space,
        lambda widths: float(-(1 / widths).sum()),
        [f"flops={int(cost(widths[None])[0])}"],
        {"flops": cost},
        SearchConfig(strategy="neighbours", evaluations=72, population=12),
    )
    assert [trial.widths for trial in found.trials] == [tuple(widths.tolist())]
    assert found.hits < 12
    assert found.notes == ("the search ended after 1 of 72 evaluations: it found no other widths",)


def test_layers_that_cost_much_are_expected_to_matter_before_anything_is_scored() -> None:
    within = constraints_of()
    share = costs_of_widening(within)
    assert share.sum() == pytest.approx(1)
    assert (share > 0).all()
    assert share[3] > share[0]  # 96 channels between 64 and 64, and 32 before 48


def test_equal_scores_are_no_error() -> None:
    within = constraints_of()
    asked = within.sample_full(np.random.default_rng(0), 5)
    model = BottleneckModel.fit(asked, np.full(5, -1.0), costs_of_widening(within))
    assert np.isfinite(model.predict(asked)).all()
    one = BottleneckModel.fit(asked[:1], np.array([-1.0]), costs_of_widening(within))
    assert within.feasible(one.best(within, asked[0], 0.5)[None])[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_search_comes_near_the_best_there_is(seed: int) -> None:
    """Within 72 scores: the climb to the best by the true law, with noise on what the search sees."""
    space, rng = space_of(), np.random.default_rng(seed)
    needs = rng.uniform(0.1, 4, len(space))
    within = constraints_of()
    found = search(
        space,
        lambda widths: float(-losses(widths, needs)) * float(np.exp(0.005 * rng.normal())),
        ["flops=20%"],
        {"flops": chain_cost(len(space))},
        SearchConfig(strategy="neighbours", evaluations=72, population=12, seed=seed),
    )
    assert found.best is not None
    assert len(found.trials) == 72
    uniform, mine = (losses(np.array(row), needs) for row in (within.uniform(), found.best.widths))
    drawn = losses(within.sample_full(rng, 5000), needs)
    assert mine < uniform
    assert mine < np.quantile(drawn, 0.002)
