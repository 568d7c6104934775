"""Scoring spread over processes by Ray gives what one process gives."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import pytest
from search_cases import Concave, chain

from bcnet.errors import BcnetError
from bcnet.search import SearchConfig, search
from bcnet.search.scorers import open_executor
from bcnet.space.widths import Widths

SPACE, COSTS = chain()
SMALL = SearchConfig(evaluations=60, population=20)


class OneByOne:
    """A scorer without score_many that fails for some widths."""

    def __init__(self) -> None:
        self._scorer = Concave(SPACE)

    def score(self, widths: Widths) -> float:
        if widths[0] == 8:
            raise RuntimeError("no")
        return self._scorer.score(widths)


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    """Two processes for all tests here: starting them takes seconds."""
    pytest.importorskip("ray")
    engine = open_executor(OneByOne(), "ray", 2)
    yield
    engine.close()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("scorer", [Concave(SPACE), OneByOne()], ids=["many", "one"])
def test_ray_gives_the_same_result(scorer: object) -> None:
    here = search(SPACE, scorer, ["flops=40%"], COSTS, SMALL)
    spread = search(SPACE, scorer, ["flops=40%"], COSTS, dataclasses.replace(SMALL, executor="ray", workers=2))
    plain = [[dataclasses.replace(t, seconds=0) for t in result.trials] for result in (here, spread)]
    assert plain[0] == plain[1]
    assert spread.best == next(t for t in spread.trials if t.number == (here.best.number if here.best else -1))


def test_missing_ray_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BcnetError) as error:
        search(SPACE, OneByOne(), ["flops=40%"], COSTS, dataclasses.replace(SMALL, executor="ray"))
    assert str(error.value) == "the ray executor needs Ray: pip install 'bcnet[ray]', or score in one process"
