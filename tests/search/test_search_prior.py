"""The prior: potential errors, the program and its bound, and what is sampled from it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import Concave, chain, every

from bcnet.errors import BcnetError
from bcnet.search import Constraints, PathLosses, SearchConfig, potential_errors, prior_population, search
from bcnet.search.prior import elimination as elimination_module
from bcnet.search.prior.elimination import Elimination
from bcnet.search.prior.problem import PriorProblem
from bcnet.search.prior.smooth import smooth
from bcnet.space.cost import PeakCost, QuadraticCost
from bcnet.space.widths import WidthSpace, WidthVariable


def random_program(seed: int, self_coupled: bool) -> tuple[PriorProblem, WidthSpace, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, 4)
    space = WidthSpace([WidthVariable(f"v{i}", tuple(range(2, 2 + 3 * k, 3))) for i, k in enumerate(counts)])
    Q = np.triu(rng.uniform(0, 3, (4, 4)) * (rng.random((4, 4)) < 0.7), 0 if self_coupled else 1)
    cost = QuadraticCost(3.0, rng.uniform(0, 5, 4), Q)
    low, high = (float(cost(w)[0]) for w in (space.min, space.max))
    limit = low + 1 + rng.random() * (high - low)
    errors = [1 + rng.random(k) for k in counts]
    return PriorProblem(space, errors, [(cost, limit)]), space, errors


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=60, deadline=None)
def test_solution_holds_the_budget_and_its_bound_is_one(seed: int, self_coupled: bool) -> None:
    program, space, errors = random_program(seed, self_coupled)
    solution = program.solve()
    p = solution.distributions
    assert (p >= 0).all()
    assert p.sum(axis=1) == pytest.approx(1)
    assert (program.excess(p) <= 1e-9).all()
    assert solution.objective >= solution.bound - 1e-9
    # The expectation over all widths, written out, is what excess and objective say.
    widths = every(space)
    chances = [
        np.prod([p[i, k] for i, k in enumerate(index)]) for index in itertools.product(*map(range, program.counts))
    ]
    cost = np.dot(chances, [float(program.excess(one_hot(program, w))[0]) for w in space.encode(widths)])
    assert cost == pytest.approx(program.excess(p)[0], abs=1e-9)
    # No plain widths are better than the bound.
    feasible = [w for w in space.encode(widths) if (program.excess(one_hot(program, w)) <= 0).all()]
    best = min(sum(e[k] for e, k in zip(errors, w, strict=True)) for w in feasible)
    assert solution.bound <= best + 1e-9
    assert solution.objective <= best + 1e-6


def one_hot(program: PriorProblem, index: np.ndarray) -> np.ndarray:
    return (np.arange(program.errors.shape[1]) == index[:, None]).astype(float)


@given(st.integers(0, 10_000), st.sampled_from([4, 30, 10**6]))
@settings(max_examples=60, deadline=None)
def test_elimination_finds_the_minimum_or_a_bound(seed: int, entries: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, 5)
    edges = [edge for edge in itertools.combinations(range(5), 2) if rng.random() < 0.6]
    unary = [rng.normal(size=k) for k in counts]
    pairs = {(i, j): rng.normal(size=(counts[i], counts[j])) for i, j in edges}

    def value(x: np.ndarray | tuple[int, ...]) -> float:
        return sum(u[k] for u, k in zip(unary, x, strict=True)) + sum(t[x[i], x[j]] for (i, j), t in pairs.items())

    least = min(value(x) for x in itertools.product(*map(range, counts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination_module, "MOST_ENTRIES", entries)
        x, bound = Elimination(counts, edges).minimise(unary, pairs)
    assert bound <= least + 1e-9
    assert value(x) >= least - 1e-9
    if entries == 10**6:
        assert (bound, value(x)) == pytest.approx((least, least))


def test_two_budgets_both_hold() -> None:
    space, costs = chain()
    flops, params = costs["flops"], costs["params"]
    assert isinstance(flops, QuadraticCost)
    assert isinstance(params, QuadraticCost)
    errors = [np.linspace(2, 1, len(v.candidates)) for v in space.variables]
    tight = [(flops, 0.3 * flops(space.max)[0]), (params, 0.25 * params(space.max)[0])]
    solution = PriorProblem(space, errors, tight).solve()
    alone = PriorProblem(space, errors, tight[:1]).solve()
    assert (PriorProblem(space, errors, tight).excess(solution.distributions) <= 1e-9).all()
    assert solution.gap < 0.01
    assert solution.objective > alone.objective


@pytest.mark.parametrize("effective", [1.5, 2.5, 4.0])
def test_smooth_prior_has_the_stated_number_of_candidates(effective: float) -> None:
    space, costs = chain(length=8, groups=10, width=60)
    flops = costs["flops"]
    assert isinstance(flops, QuadraticCost)
    errors = [np.sort(np.random.default_rng(i).random(len(v.candidates)))[::-1] for i, v in enumerate(space.variables)]
    program = PriorProblem(space, errors, [(flops, 0.4 * flops(space.max)[0])])
    solution = program.solve()
    soft = smooth(program, solution, effective)
    assert soft.effective == pytest.approx(effective, rel=0.1)
    assert (program.excess(soft.distributions) <= 0).all()
    assert program.objective(soft.distributions) >= solution.bound
    cold = smooth(program, solution, 1.0)
    assert program.objective(cold.distributions) == pytest.approx(solution.objective, rel=0.05)


def test_potential_errors_are_means_and_unrecorded_ones_are_interpolated() -> None:
    space = WidthSpace([WidthVariable("a", (1, 2, 3, 4)), WidthVariable("b", (2, 4))])
    recorded = PathLosses([[1, 2], [1, 4], [3, 2], [4, 2]], [1.0, 3.0, 4.0, 9.0])
    errors = potential_errors(space, recorded, top=3)
    assert errors.values[0].tolist() == [2.0, 3.0, 4.0, 4.0]
    assert errors.values[1].tolist() == [2.5, 3.0]
    assert errors.estimated == 2


def test_bad_loss_logs_are_refused() -> None:
    space = WidthSpace([WidthVariable("a", (1, 2))])
    with pytest.raises(BcnetError, match=r"^2 configurations have 1 losses: record one for each$"):
        potential_errors(space, PathLosses([[1], [2]], [1.0]))
    with pytest.raises(BcnetError, match=r"^the prior needs at least one finite training loss: "):
        potential_errors(space, PathLosses([[1]], [float("nan")]))


def noisy_log(space: WidthSpace, scorer: Concave) -> PathLosses:
    rng = np.random.default_rng(5)
    widths = space.sample(rng, 600)
    return PathLosses(widths, (96 - scorer.score_many(widths)) / 2 + rng.normal(0, 0.1, 600))


def test_prior_population_is_feasible_different_and_better_than_random() -> None:
    space, costs = chain(length=8, groups=10, width=60)
    constraints = Constraints(space, costs, ["flops=35%", "memory=80%"])
    scorer = Concave(space)
    rng = np.random.default_rng(0)
    widths, report = prior_population(constraints, potential_errors(space, noisy_log(space, scorer)), 40, rng)
    assert widths.shape == (40, 8)
    assert len(np.unique(widths, axis=0)) == 40
    assert constraints.feasible(widths).all()
    assert report.sampled == 40
    assert report.notes == ()
    assert report.gap < 0.025
    assert scorer.score_many(widths).mean() > scorer.score_many(constraints.sample(rng, 40)[0]).mean()


def test_prior_says_when_it_must_add_other_widths() -> None:
    space, costs = chain(length=2, groups=3)
    constraints = Constraints(space, costs, ["flops=60%"])
    errors = potential_errors(space, PathLosses([[8, 8]], [1.0]))
    widths, report = prior_population(constraints, errors, 40, np.random.default_rng(0), effective=1.0)
    count = int(constraints.feasible(every(space)).sum())
    assert len(widths) <= count < 40
    assert report.notes == (
        f"2000 draws from the prior gave {report.sampled} of 40 different widths within the budgets; "
        f"{len(widths) - report.sampled} shrunk or random ones were added",
    )


def test_prior_needs_a_quadratic_budget() -> None:
    space, costs = chain()
    assert isinstance(costs["memory"], PeakCost)
    constraints = Constraints(space, costs, ["memory=50%"])
    errors = potential_errors(space, PathLosses(space.max[None], [1.0]))
    with pytest.raises(BcnetError) as error:
        prior_population(constraints, errors, 4, np.random.default_rng(0))
    assert str(error.value) == (
        "the prior needs a budget of flops or params: add one, or start from a random population"
    )


def test_search_starts_from_the_prior() -> None:
    space, costs = chain()
    scorer = Concave(space)
    log = noisy_log(space, scorer)
    result = search(space, scorer, ["flops=35%"], costs, SearchConfig(evaluations=60, population=20), initial=log)
    assert result.prior is not None
    assert result.prior.objective >= result.prior.bound - 1e-9
    first = [t.widths for t in result.trials if t.generation == 1]
    constraints = Constraints(space, costs, ["flops=35%"])
    assert len(first) == 20
    assert first[0] == tuple(space.decode(constraints.uniform_index()))
