"""The verb: every strategy keeps its promises, and a scorer's failures stay its own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from search_cases import Concave, chain, every

from bcnet.errors import BcnetError
from bcnet.search import (
    STRATEGIES,
    Constraints,
    PathLosses,
    SearchConfig,
    SearchProgress,
    Trial,
    best_so_far,
    front_of,
    search,
)
from bcnet.search.criteria import allot
from bcnet.space.cost import QuadraticCost
from bcnet.space.widths import Widths, WidthSpace, WidthVariable

SPACE, COSTS = chain()
SMALL = SearchConfig(evaluations=200, population=20)


def best_feasible(percent: float) -> float:
    widths = every(SPACE)
    feasible = COSTS["flops"](widths) <= percent / 100 * COSTS["flops"](SPACE.max)[0]
    return float(Concave(SPACE).score_many(widths[feasible]).max())


IMPORTANCE = [np.random.default_rng(i).random(24) * 4**i for i in range(len(SPACE))]
"""Of every channel; the last layer's are the largest by far, for no good reason."""


def given_to(strategy: str) -> dict[str, Any]:
    """What a strategy must be given to start."""
    losses = PathLosses(SPACE.sample(np.random.default_rng(0), 300), np.random.default_rng(1).random(300))
    return {"prior": {"initial": losses}, "legr": {"importance": IMPORTANCE}}.get(strategy, {})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_stays_within_budgets_and_evaluations(strategy: str) -> None:
    scorer = Concave(SPACE)
    config = dataclasses.replace(SMALL, strategy=strategy)
    result = search(SPACE, scorer, ["flops=40%", "memory=80%"], COSTS, config, **given_to(strategy))
    assert result.best is not None
    assert result.best.feasible
    for name, percent in (("flops", 40), ("memory", 80)):
        assert result.best.costs[name] == COSTS[name](result.best.widths)[0]
        assert result.best.costs[name] <= percent / 100 * COSTS[name](SPACE.max)[0]
    assert len(result.trials) <= 200
    assert len(set(scorer.asked)) == len(scorer.asked) == len(result.trials)
    assert [t.number for t in result.trials] == list(range(len(result.trials)))
    assert result.best.score == best_so_far(result.trials)[-1]


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_follow_the_scores(seed: int) -> None:
    """Where scores are linear in the logarithms of widths, few evaluations come near the best."""
    pull = np.random.default_rng(seed).normal(size=len(SPACE))

    class Linear(Concave):
        def score_many(self, widths: Widths) -> np.ndarray:
            return np.log(np.atleast_2d(widths)) @ pull

    config = SearchConfig(strategy="neighbours", evaluations=40, population=8, seed=seed)
    result = search(SPACE, Linear(SPACE), ["flops=30%"], COSTS, config)
    widths = every(SPACE)
    feasible = widths[COSTS["flops"](widths) <= 0.3 * COSTS["flops"](SPACE.max)[0]]
    scores = np.sort(Linear(SPACE).score_many(feasible))
    assert result.best is not None
    assert result.best.score is not None
    assert result.best.score >= scores[int(0.95 * len(scores))]


@pytest.mark.parametrize("seed", range(3))
def test_evolution_finds_nearly_the_best(seed: int) -> None:
    result = search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, dataclasses.replace(SMALL, seed=seed))
    assert result.best is not None
    assert result.best.score is not None
    assert result.best.score >= best_feasible(30) - 0.02


@pytest.mark.parametrize("strategy", ["markov", "agent", "legr"])
def test_rivals_learn_from_scores(strategy: str) -> None:
    """More than the widths that they begin with, and than a tenth of the evaluations, can tell."""
    config = dataclasses.replace(SMALL, strategy=strategy)
    result = search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, config, **given_to(strategy))
    course = [score for score in best_so_far(result.trials) if score is not None]
    assert course[0] < course[len(course) // 10] < course[-1]
    assert course[-1] >= best_feasible(30) - 0.1


def test_legr_begins_with_the_plain_global_ranking() -> None:
    config = SearchConfig(strategy="legr", evaluations=1)
    first = search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, config, importance=IMPORTANCE).trials[0]
    assert first.widths == tuple(allot(Constraints(SPACE, COSTS, ["flops=30%"]), IMPORTANCE))


@pytest.mark.parametrize(("strategy", "given"), [("legr", {}), ("random", {"importance": IMPORTANCE})])
def test_importance_is_for_legr_alone(strategy: str, given: dict[str, Any]) -> None:
    with pytest.raises(BcnetError) as error:
        search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, SearchConfig(strategy=strategy), **given)
    assert str(error.value) == (
        "strategy 'legr', and no other, ranks channels by their importance: give both or neither"
    )


def test_evolution_is_never_worse_than_uniform() -> None:
    even = search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, SearchConfig(strategy="uniform"))
    first = search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, SearchConfig(evaluations=1))
    assert first.trials[0].widths == even.trials[-1].widths


def test_evolution_scores_only_feasible_widths_unless_told_otherwise() -> None:
    assert all(t.feasible for t in search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, SMALL).trials)
    plain = SearchConfig.paper(evaluations=200, population=20)
    assert not all(t.feasible for t in search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, plain).trials)


@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize("percent", [10, 30, 60])
def test_most_of_what_evolution_scores_uses_the_budget(percent: int, pool: int) -> None:
    space, costs = chain(groups=24)
    budgets, config = [f"flops={percent}%"], SearchConfig(evaluations=60, population=20, pool=pool)
    trials = search(space, Concave(space), budgets, costs, config).trials
    used = Constraints(space, costs, budgets).used(np.array([t.widths for t in trials]))
    assert (used <= 1).all()
    assert (used >= 0.95).mean() >= 0.5


def test_same_seed_same_trials_and_another_seed_others() -> None:
    def course(seed: int) -> list[tuple[int, ...]]:
        config = dataclasses.replace(SMALL, seed=seed)
        return [t.widths for t in search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, config).trials]

    assert course(1) == course(1)
    assert course(1) != course(2)


def test_given_population_is_scored_first() -> None:
    given = SPACE.decode([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [2, 1, 0, 1, 2]])
    result = search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, SMALL, initial=given)
    assert [t.widths for t in result.trials[:3]] == [tuple(row) for row in given.tolist()]
    with pytest.raises(BcnetError) as error:
        search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, SearchConfig(strategy="greedy"), initial=given)
    assert str(error.value) == "strategy 'greedy' takes no initial population: leave it out, or use evolution"


def test_greedy_drops_what_hurts_least_and_keeps_every_network() -> None:
    scorer = Concave(SPACE)
    result = search(SPACE, scorer, ["flops=50%"], COSTS, SearchConfig(strategy="greedy", evaluations=10_000))
    assert result.notes == ()
    assert result.trials[0].widths == tuple(SPACE.max)
    chosen = SPACE.max
    for generation in range(2, result.trials[-1].generation + 1):
        step = [t for t in result.trials if t.generation == generation]
        drops = SPACE.encode(chosen).sum() - SPACE.encode([t.widths for t in step]).sum(axis=1)
        assert (drops == 1).all()
        scores = scorer.score_many(np.array([t.widths for t in step]))
        chosen = np.array(step[int(scores.argmax())].widths)
    assert COSTS["flops"](chosen)[0] <= COSTS["flops"](SPACE.max)[0] / 2


def test_front_is_the_pareto_front_of_all_trials() -> None:
    result = search(SPACE, Concave(SPACE), ["flops=50%"], COSTS, SMALL)
    points = np.array([(t.costs["flops"], -t.score) for t in result.trials if t.score is not None])
    for trial in result.trials:
        one = np.array([trial.costs["flops"], -(trial.score or 0)])
        dominated = ((points <= one).all(axis=1) & (points < one).any(axis=1)).any()
        twin = any(t.costs["flops"] == trial.costs["flops"] and t.score == trial.score for t in result.front)
        assert twin != dominated
    assert result.best in result.front


def test_front_keeps_one_of_equals() -> None:
    trials = [Trial(i, (i,), score, {"flops": 5}, True, 1, 0.0) for i, score in enumerate([1.0, 2.0, 2.0])]
    assert front_of(trials, "flops") == (trials[1],)


def test_failing_scorer_is_recorded_and_the_search_goes_on() -> None:
    def score(widths: Widths) -> object:
        if widths[0] == 4:
            raise RuntimeError("no memory")
        return {8: float("nan"), 12: "good"}.get(int(widths[0]), float(widths.sum()))

    result = search(SPACE, score, ["flops=50%"], COSTS, SMALL)
    assert len(result.trials) == 200
    reasons = {t.widths[0]: t.failure for t in result.trials}
    assert reasons[4] == "RuntimeError: no memory"
    assert reasons[8] == "the scorer returned nan"
    assert reasons[12] == "the scorer returned 'good', which is no number"
    assert result.best is not None
    assert result.best.widths[0] >= 16
    assert all((t.score is None) == (t.failure is not None) for t in result.trials)


def test_one_bad_row_does_not_fail_a_batch() -> None:
    class Batched:
        def score_many(self, widths: Widths) -> np.ndarray:
            if (widths[:, 0] == 4).any():
                raise RuntimeError("bad row")
            return widths.sum(axis=1)

    result = search(SPACE, Batched(), ["flops=50%"], COSTS, dataclasses.replace(SMALL, strategy="random"))
    assert {t.widths[0] == 4 for t in result.trials if t.score is None} == {True}
    assert {t.widths[0] == 4 for t in result.trials if t.score is not None} == {False}


def test_scorer_that_always_fails_stops_the_search() -> None:
    def score(widths: Widths) -> float:
        raise KeyError("weights")

    with pytest.raises(BcnetError, match=r"^the first 100 trials all failed, the last with: KeyError: 'weights'$"):
        search(SPACE, score, ["flops=50%"], COSTS, SMALL)
    few = search(SPACE, score, ["flops=50%"], COSTS, dataclasses.replace(SMALL, evaluations=30))
    assert few.best is None
    assert few.notes[-1] == "no widths within the budgets got a score, the last failed with KeyError: 'weights'"


def test_something_that_cannot_score_is_refused() -> None:
    with pytest.raises(BcnetError) as error:
        search(SPACE, 3, ["flops=50%"], COSTS, SMALL)
    assert str(error.value) == "3 cannot score: give a function of widths, or an object with a method score"


@pytest.mark.parametrize("strategy", ["evolution", "neighbours", "random"])
def test_small_space_is_exhausted_and_said_so(strategy: str) -> None:
    space, costs = chain(length=2, groups=3)
    config = dataclasses.replace(SMALL, strategy=strategy, evaluations=space.size)
    result = search(space, Concave(space), ["flops=60%"], costs, config)
    widths = every(space)
    feasible = int((costs["flops"](widths) <= 0.6 * costs["flops"](space.max)[0]).sum())
    assert len(result.trials) == feasible
    assert result.notes == (f"all {feasible} configurations within the budgets were scored",)
    assert result.best is not None
    within = widths[costs["flops"](widths) <= 0.6 * costs["flops"](space.max)[0]]
    assert result.best.score == max(Concave(space).score(row) for row in within)


def test_enumeration_asks_for_neighbours_together_and_says_where_it_stops() -> None:
    space, costs = chain(length=2, groups=3)
    config = SearchConfig(strategy="enumerate", evaluations=4)
    result = search(space, Concave(space), ["flops=100%"], costs, config)
    assert [t.widths for t in result.trials] == [tuple(row) for row in every(space)[:4].tolist()]
    assert {t.generation for t in result.trials} == {1}
    assert result.notes == ("the first 4 configurations within the budgets were scored: allow more for all of them",)


def test_a_space_too_large_to_enumerate_is_refused() -> None:
    space, costs = chain(length=8, groups=8)
    with pytest.raises(BcnetError) as error:
        search(space, Concave(space), ["flops=50%"], costs, SearchConfig(strategy="enumerate"))
    assert str(error.value) == (
        f"this space has {space.size:,} configurations, but at most 1,000,000 can be enumerated: search by evolution"
    )


@pytest.mark.parametrize(
    ("candidates", "feasible"), [([tuple(range(1, 30))], 22), ([(4,), (2, 4), (3,)], 2), ([(4,), (4,)], 1)]
)
def test_tiny_spaces_are_searched_whole(candidates: list[tuple[int, ...]], feasible: int) -> None:
    space = WidthSpace([WidthVariable(f"v{i}", c) for i, c in enumerate(candidates)])
    cost = QuadraticCost(0.0, np.ones(len(space)), np.eye(len(space)))
    limit = 60 if len(space) == 1 else 100
    result = search(space, Concave(space), [f"flops={limit}%"], {"flops": cost}, SMALL)
    assert len(result.trials) == feasible


def test_budget_of_the_smallest_network_finds_it() -> None:
    least = int(COSTS["flops"](SPACE.min)[0])
    for strategy in STRATEGIES:
        config = dataclasses.replace(SMALL, strategy=strategy)
        best = search(SPACE, Concave(SPACE), [f"flops={least}"], COSTS, config, **given_to(strategy)).best
        assert best is not None
        assert best.widths == tuple(SPACE.min)


def test_progress_is_told_of_every_trial() -> None:
    told: list[SearchProgress] = []
    result = search(SPACE, Concave(SPACE), ["flops=50%"], COSTS, SMALL, progress=told.append)
    assert [p.evaluations for p in told] == list(range(1, 201))
    assert told[-1].best == result.best
    assert told[-1].most_evaluations == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluations": 0}, "evaluations is 0, but it must be at least 1"),
        ({"population": 1}, "population is 1, but it must be at least 2"),
        ({"front_share": 1.5}, "front_share is 1.5, but it must be at most 1"),
        ({"prior_spread": 0.5}, "prior_spread is 0.5, but it must be at least 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BcnetError) as error:
        SearchConfig(**settings)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_settings_survive_json() -> None:
    config = SearchConfig(evaluations=7, front_share=0.5)
    assert SearchConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    with pytest.raises(BcnetError, match=r"^unknown key velocity: there are strategy, "):
        SearchConfig(velocity=3)  # type: ignore[call-arg]


def test_unknown_strategy_and_engine_are_refused() -> None:
    with pytest.raises(BcnetError) as error:
        search(SPACE, Concave(SPACE), ["flops=50%"], COSTS, SearchConfig(strategy="luck"))
    assert (
        str(error.value)
        == "unknown strategy 'luck': choose from evolution, neighbours, prior, markov, agent, legr, greedy, random, "
        "uniform, enumerate"
    )
    with pytest.raises(BcnetError, match=r"^unknown executor 'cloud': choose here or ray$"):
        search(SPACE, Concave(SPACE), ["flops=50%"], COSTS, SearchConfig(executor="cloud"))


def test_candidates_that_cannot_express_uniform_scaling_are_told() -> None:
    def score(widths: Widths) -> float:
        SPACE.encode(widths)  # fails between candidates, as a table does
        return float(widths.sum())

    found = search(SPACE, score, ["flops=30%"], COSTS, SearchConfig(strategy="uniform"))
    assert found.best is not None
    used = found.best.costs["flops"] / (0.3 * COSTS["flops"](SPACE.max)[0])
    assert f"the candidates cannot express uniform scaling: those about it use {used:.1%} of the budget" in found.notes
    assert not search(SPACE, Concave(SPACE), ["flops=30%"], COSTS, SearchConfig(strategy="uniform")).notes
