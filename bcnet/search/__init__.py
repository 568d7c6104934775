"""Which widths to try: budgets, the prior population, evolution, greedy slimming and baselines."""

from bcnet.search.config import SearchConfig
from bcnet.search.constraints import Budget, Constraints, Feasibility, format_cost, parse_budget
from bcnet.search.driver import STRATEGIES, SearchResult, search
from bcnet.search.ledger import SearchProgress
from bcnet.search.predictors.log_width import LogWidthModel
from bcnet.search.prior.population import PathLosses, PotentialErrors, PriorReport, potential_errors, prior_population
from bcnet.search.store import TrialStore
from bcnet.search.trial import Trial, best_of, best_so_far, front_of

__all__ = [
    "STRATEGIES",
    "Budget",
    "Constraints",
    "Feasibility",
    "LogWidthModel",
    "PathLosses",
    "PotentialErrors",
    "PriorReport",
    "SearchConfig",
    "SearchProgress",
    "SearchResult",
    "Trial",
    "TrialStore",
    "best_of",
    "best_so_far",
    "format_cost",
    "front_of",
    "parse_budget",
    "potential_errors",
    "prior_population",
    "search",
]
