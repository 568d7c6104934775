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

    The five settings after ``retained`` (of which the paper retains 10) are what evolution adds to NSGA-II;
    ``docs/results/search.md`` has the effect of each. Where the log-width model decides
    (:class:`~bcnet.search.predictors.log_width.LogWidthModel`), its best configuration is scored last. It is for scores
    that err, as a supernet's do, and has no say in ``greedy`` and ``uniform``.
    """

    strategy: Annotated[
        str, "evolution, neighbours, prior, markov, agent, legr, greedy, random, uniform or enumerate"
    ] = "evolution"
    evaluations: Annotated[Count, "how many different configurations are scored"] = 2000
    population: Annotated[Whole, Field(ge=2), "configurations of a generation"] = 40
    seed: Natural = 0
    retained: Annotated[Natural, "how many of each generation live on as parents; 0: as many as the population"] = 0
    feasible_only: Annotated[bool, "whether offspring beyond a budget are shrunk until they hold it"] = True
    pool: Annotated[Count, "offspring made for each one that a surrogate picks to be scored; 1: no surrogate"] = 4
    hill_climbs: Annotated[Natural, "how many of the best, and of the front, climb on the surrogate into the pool"] = 10
    explore: Annotated[Share, "how far the surrogate's doubt is explored, 0 to 1"] = 1.0
    front_share: Annotated[Share, "the share of each generation that is picked for the Pareto front"] = 0.25
    choose: Annotated[
        Literal["score", "log-width"], "score: the best one; log-width (experimental): a model of all of them decides"
    ] = "score"
    prior_spread: Annotated[
        float, Field(ge=1), "about how many widths of each layer the first population is drawn from; 1: the likeliest"
    ] = 2.0
    executor: Annotated[str, "here, or ray to spread scoring over machines"] = "here"
    workers: Annotated[Count, "processes of the executor"] = 1

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
        """The settings that decide which widths are asked for. Where they are scored does not matter, nor how many are,
        unless the log-width model has the last word."""
        apart = ("executor", "workers") if self.by_log_width else ("executor", "workers", "evaluations", "choose")
        return {k: v for k, v in asdict(self).items() if k not in apart}
