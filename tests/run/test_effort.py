"""How much work a run does, in one word."""

from __future__ import annotations

import pytest

from bcnet.errors import BcnetError
from bcnet.run.effort import with_effort
from bcnet.run.recipe import Recipe

RECIPE = Recipe(model="zoo:digits_cnn", data="digits")


def test_quick_is_never_more_and_paper_never_less() -> None:
    quick, paper = with_effort(RECIPE, "quick"), with_effort(RECIPE, "paper")
    assert (quick.given.epochs, quick.retrain.epochs, quick.search.evaluations) == (15, 5, 40)
    assert (paper.given.epochs, paper.retrain.epochs, paper.search.evaluations) == (300, 300, 2000)
    short = RECIPE.changed(retrain={"epochs": 1, "warmup": 0})
    assert with_effort(short, "quick").retrain.epochs == 1
    assert (RECIPE.healing.share, quick.healing.share, paper.healing.share) == (1, 1, 0)  # 0: no bound
    assert with_effort(RECIPE, "normal") == RECIPE
    assert with_effort(RECIPE.changed(race=None), "quick").race is None


def test_other_efforts_are_refused() -> None:
    with pytest.raises(BcnetError, match="--effort is 'all', but it must be one of quick, normal, paper"):
        with_effort(RECIPE, "all")
