"""The settings of a search, as one object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bcnet.errors import BcnetError
from bcnet.utils.settings import Count, Natural, Share, Whole, checked


@checked
class SearchConfig:
    """What to search with. ``SearchConfig()`` is what we recommend; :meth:`paper` is the paper's NSGA-II.

    ``evaluations`` bounds how many different configurations are scored: 50 generations of 40. The five settings
    after ``retained`` are what evolution adds to NSGA-II; ``docs/results/search.md`` has the effect of each.
    """

    strategy: str = "evolution"
    evaluations: Count = 2000
    population: Annotated[Whole, Field(ge=2)] = 40
    seed: Natural = 0
    retained: Natural = 0
    """How many of each generation live on as parents; 0: as many as the population. The paper retains 10."""
    feasible_only: bool = True
    """Offspring that break a budget are shrunk until they hold it, so none is scored in vain."""
    pool: Count = 4
    """Offspring made for each one scored: a surrogate picks the most promising. 1: no surrogate."""
    hill_climbs: Natural = 10
    """How many of the best widths, and of the front, climb on the surrogate into that pool."""
    explore: Share = 1.0
    """How far the surrogate's doubt is explored: 1 draws it from its posterior, 0 trusts its likeliest guess."""
    front_share: Share = 0.25
    """The share of each generation picked for the Pareto front rather than for the best score."""
    choose: Literal["score", "log-width"] = "score"
    """What decides: the best ``score``, or the ``log-width`` model (experimental) fitted to all scores, whose best
    configuration is scored last (:class:`~bcnet.search.predictors.log_width.LogWidthModel`). The model is for scores
    that err, as a supernet's do; ``greedy`` and ``uniform`` end where they end."""
    prior_spread: Annotated[float, Field(ge=1)] = 2.0
    """Prior population: about how many candidates of each variable it is sampled from; 1 takes the likeliest alone."""
    executor: str = "here"
    workers: Count = 1

    @model_validator(mode="after")
    def _fits_together(self) -> SearchConfig:
        if self.by_log_width and self.evaluations < 2:
            raise BcnetError(
                "evaluations is 1, but the log-width model needs one to fit and one to try: give at least 2"
            )
        return self

    @classmethod
    def paper(cls, **settings: Any) -> SearchConfig:
        """NSGA-II as the paper runs it: 10 retained, no repair, no surrogate."""
        return cls(**{"retained": 10, "feasible_only": False, "pool": 1, "hill_climbs": 0, **settings})

    @property
    def by_log_width(self) -> bool:
        """Whether the log-width model decides."""
        return self.choose == "log-width" and self.strategy in (
            "evolution", "neighbours", "prior", "random", "enumerate",
        )  # fmt: skip

    @property
    def room(self) -> int:
        """How many evaluations are left for the strategy."""
        return self.evaluations - int(self.by_log_width)

    def identity(self) -> dict[str, Any]:
        """The settings that decide which widths are asked for; where they are scored does not, nor does how many
        are, unless the last is the log-width model's."""
        apart = ("executor", "workers") if self.by_log_width else ("executor", "workers", "evaluations", "choose")
        return {k: v for k, v in asdict(self).items() if k not in apart}
