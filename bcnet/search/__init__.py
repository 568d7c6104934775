"""Which widths to try: budgets, the prior population, evolution, greedy slimming and baselines."""

from bcnet.search.budget import Budget, Feasibility, Limits, format_cost, parse_budget
from bcnet.search.config import SearchConfig
from bcnet.search.finalists import Finalist, measure_finalists
from bcnet.search.law import WidthLaw
from bcnet.search.ledger import Progress
from bcnet.search.prior import LossLog, PotentialErrors, PriorReport, prior_population
from bcnet.search.run import STRATEGIES, SearchResult, search
from bcnet.search.store import TrialStore
from bcnet.search.trial import Trial, best_of, best_so_far, front_of

__all__ = [
    "STRATEGIES",
    "Budget",
    "Feasibility",
    "Finalist",
    "Limits",
    "LossLog",
    "PotentialErrors",
    "PriorReport",
    "Progress",
    "SearchConfig",
    "SearchResult",
    "Trial",
    "TrialStore",
    "WidthLaw",
    "best_of",
    "best_so_far",
    "format_cost",
    "front_of",
    "measure_finalists",
    "parse_budget",
    "prior_population",
    "search",
]
