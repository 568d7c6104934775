"""The log-width model: what it fits, what it chooses, and searches in which it decides."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import kendalltau
from search_cases import Concave, chain, every

from bcnet.errors import BcnetError
from bcnet.search import Constraints, LogWidthModel, SearchConfig, TrialStore, best_of, search
from bcnet.search.predictors import climb
from bcnet.search.predictors import log_width as module
from bcnet.space.widths import Widths, WidthSpace

SPACE, COSTS = chain()
BY_LAW = SearchConfig(evaluations=120, population=20, choose="log-width")


class Noisy(Concave):
    """As :class:`Concave`, with an error of its own for each widths, the same whenever it is asked."""

    def score_many(self, widths: Widths) -> NDArray[np.float64]:
        errors = [np.random.default_rng([*row.tolist(), 7]).normal(0, 0.5) for row in widths]
        return super().score_many(widths) + errors


def test_equal_gains_are_found_as_they_are() -> None:
    widths = SPACE.sample(np.random.default_rng(0), 50)
    model = LogWidthModel.fit(widths, 3.0 + 0.25 * np.log2(widths).sum(axis=1))
    np.testing.assert_allclose(model.gains, 0.25)
    assert model.constant == pytest.approx(3.0)
    np.testing.assert_allclose(model.predict(widths), 3.0 + 0.25 * np.log2(widths).sum(axis=1))


def test_gains_that_differ_keep_their_order_and_draw_nearer() -> None:
    true = np.array([0.0, 0.1, 0.2, 0.4, 0.8])
    widths = every(SPACE)
    gains = LogWidthModel.fit(widths, np.log2(widths) @ true).gains
    # All widths of the space once: the logarithms are uncorrelated, so each gain is drawn half way to the mean.
    np.testing.assert_allclose(gains, 0.5 * true + 0.5 * true.mean(), atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(layers=st.lists(st.integers(1, 12), min_size=5, max_size=5), per_layer=st.floats(0.01, 1))
def test_gains_that_are_the_same_for_every_layer_are_found_as_they_are(layers: list[int], per_layer: float) -> None:
    widths = SPACE.sample(np.random.default_rng(0), 50)
    model = LogWidthModel.fit(widths, np.log2(widths) @ layers * per_layer, layers)
    np.testing.assert_allclose(model.gains, per_layer * np.array(layers), rtol=1e-6)


def test_a_width_of_many_layers_is_held_worth_more_where_scores_tell_little() -> None:
    rng = np.random.default_rng(0)
    widths = SPACE.sample(rng, 12)
    scores = np.log2(widths).sum(axis=1) + rng.normal(0, 5, 12)
    gains = LogWidthModel.fit(widths, scores, [6, 1, 1, 1, 1]).gains
    assert gains[0] > 3 * gains[1:].max() > 0


def test_balanced_law_counts_every_width_once_for_each_of_its_layers() -> None:
    variables = [dataclasses.replace(v, layers=("a", "b", "c") if i else ()) for i, v in enumerate(SPACE.variables)]
    space = WidthSpace(variables)
    assert space.layer_counts.tolist() == [1, 3, 3, 3, 3]
    assert LogWidthModel.balanced(space).gains.tolist() == [1, 3, 3, 3, 3]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 40))
def test_gains_are_never_negative_and_scores_shift_nothing_but_the_constant(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    widths, scores = SPACE.sample(rng, count), rng.normal(size=count)
    model, shifted = LogWidthModel.fit(widths, scores), LogWidthModel.fit(widths, scores + 10)
    assert (model.gains >= 0).all()
    np.testing.assert_allclose(shifted.gains, model.gains, atol=1e-8)
    np.testing.assert_allclose(shifted.predict(widths), model.predict(widths) + 10, atol=1e-6)


def test_gains_come_out_alike_where_scores_tell_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def spread(noise: float, seed: int) -> float:
        rng = np.random.default_rng(seed)
        widths = SPACE.sample(rng, 60)
        gains = LogWidthModel.fit(widths, np.log2(widths) @ [0.1, 0.2, 0.3, 0.4, 0.5] + rng.normal(0, noise, 60)).gains
        return float(gains.std() / gains.mean())

    clear, dim = (np.mean([spread(noise, seed) for seed in range(10)]) for noise in (0.01, 2.0))
    assert clear == pytest.approx(0.5 * np.std([0.1, 0.2, 0.3, 0.4, 0.5]) / 0.3, rel=0.1)
    monkeypatch.setattr(module, "SHRINKS", [module.LEAST_SHRINK])
    assert dim < 0.7 * np.mean([spread(2.0, seed) for seed in range(10)])


def test_noise_is_seen_through() -> None:
    scorer = Noisy(SPACE)
    all_widths = every(SPACE)
    truth = Concave(SPACE).score_many(all_widths)
    seen = SPACE.sample(np.random.default_rng(0), 100)
    model = LogWidthModel.fit(seen, scorer.score_many(seen))
    assert kendalltau(scorer.score_many(all_widths), truth).statistic < 0.7
    assert kendalltau(model.predict(all_widths), truth).statistic > 0.8


@pytest.mark.parametrize("many", [0, climb.MANY])
@settings(max_examples=25, deadline=None)
@given(gains=st.lists(st.floats(0, 1), min_size=5, max_size=5), percent=st.floats(8, 100))
def test_choice_is_close_to_the_best_there_is(many: int, gains: list[float], percent: float) -> None:
    """With few moves to choose from, and as with many."""
    constraints = Constraints(SPACE, COSTS, [f"flops={percent}%", "memory=90%"])
    model, all_widths = LogWidthModel(np.array(gains), 0.0), every(SPACE)
    with patch.object(climb, "MANY", many):
        found = model.best(constraints)
    assert constraints.feasible(found[None])[0]
    best = model.predict(all_widths[constraints.feasible(all_widths)]).max()
    assert model.predict(found) >= best - 0.03 * sum(gains) - 1e-9


def test_law_without_evidence_chooses_uniform_scaling() -> None:
    constraints = Constraints(SPACE, COSTS, ["flops=50%"])
    model = LogWidthModel.fit(SPACE.sample(np.random.default_rng(0), 20), np.ones(20))
    assert model.gains.tolist() == [0.0] * 5
    assert model.best(constraints).tolist() == SPACE.decode(constraints.uniform_index()).tolist()


def test_search_by_law_scores_its_choice_last() -> None:
    scorer = Noisy(SPACE)
    result = search(SPACE, scorer, ["flops=30%"], COSTS, BY_LAW)
    assert result.log_width is not None
    assert len(result.trials) == BY_LAW.evaluations
    fitted = LogWidthModel.fit([t.widths for t in result.trials[:-1]], [t.score for t in result.trials[:-1]])
    np.testing.assert_allclose(result.log_width.gains, fitted.gains)
    constraints = Constraints(SPACE, COSTS, ["flops=30%"])
    assert result.best is not None
    assert list(result.best.widths) == fitted.best(constraints).tolist()
    assert result.best.feasible


def test_errors_of_the_scorer_mislead_the_score_but_not_the_law() -> None:
    truth = Concave(SPACE)

    def found(seed: int) -> tuple[float, float]:
        result = search(SPACE, Noisy(SPACE), ["flops=30%"], COSTS, dataclasses.replace(BY_LAW, seed=seed))
        by_score = best_of(result.trials, "flops")
        assert result.best is not None
        assert by_score is not None
        return truth.score(np.array(result.best.widths)), truth.score(np.array(by_score.widths))

    by_log_width, by_score = np.array([found(seed) for seed in range(6)]).T
    assert by_log_width.mean() > by_score.mean() + 0.05


def test_search_by_law_that_was_stopped_ends_the_same(tmp_path) -> None:
    whole = search(SPACE, Noisy(SPACE), ["flops=30%"], COSTS, BY_LAW)

    class Stopped(Noisy):
        def score_many(self, widths: Widths) -> NDArray[np.float64]:
            if len(self.asked) >= 70:
                raise KeyboardInterrupt
            return super().score_many(widths)

    with TrialStore(tmp_path / "trials.sqlite") as store, pytest.raises(KeyboardInterrupt):
        search(SPACE, Stopped(SPACE), ["flops=30%"], COSTS, BY_LAW, store=store)
    with TrialStore(tmp_path / "trials.sqlite") as store:
        resumed = search(SPACE, Noisy(SPACE), ["flops=30%"], COSTS, BY_LAW, store=store)
        assert [t.widths for t in resumed.trials] == [t.widths for t in whole.trials]
        assert resumed.best is not None
        assert whole.best is not None
        assert resumed.best.widths == whole.best.widths
        assert len(store.trials()) == BY_LAW.evaluations
        more = dataclasses.replace(BY_LAW, evaluations=200)
        with pytest.raises(BcnetError, match=r"holds a search with another evaluations \(120, not 200\)"):
            search(SPACE, Noisy(SPACE), ["flops=30%"], COSTS, more, store=store)


def test_choice_that_cannot_be_scored_gives_way_to_the_best_score() -> None:
    few = dataclasses.replace(BY_LAW, evaluations=12, population=4)

    class LastFails(Concave):
        def score(self, widths: Widths) -> float:
            if len(self.asked) == few.evaluations - 1:
                raise RuntimeError("no memory")
            return super().score(widths)

    scorer = LastFails(SPACE)
    result = search(SPACE, lambda widths: scorer.score(widths), ["flops=30%"], COSTS, few)
    assert result.notes == (
        "the log-width model's choice could not be scored (RuntimeError: no memory), so the best score was taken",
    )
    assert result.best == best_of(result.trials, "flops")


def test_strategies_that_end_by_themselves_have_no_law() -> None:
    for strategy in ("greedy", "uniform"):
        config = dataclasses.replace(BY_LAW, strategy=strategy, evaluations=10_000)
        result = search(SPACE, Concave(SPACE), ["flops=50%"], COSTS, config)
        assert result.log_width is None
        assert result.best == best_of(result.trials, "flops")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"choose": "taste"}, "choose is 'taste', but it must be score or log-width"),
        (
            {"choose": "log-width", "evaluations": 1},
            "evaluations is 1, but the log-width model needs one to fit and one to try: give at least 2",
        ),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(BcnetError) as error:
        SearchConfig(**settings)
    assert str(error.value) == message
