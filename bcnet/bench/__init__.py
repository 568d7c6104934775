"""Channel-Bench-Macro: spaces whose every network was trained, their tables, and rank correlation with them."""

from bcnet.bench.correlation import correlations, kendall, noise_ceiling, pearson, spearman
from bcnet.bench.spaces import BenchSpace, get_space
from bcnet.bench.table import ChannelBench

__all__ = [
    "BenchSpace",
    "ChannelBench",
    "correlations",
    "get_space",
    "kendall",
    "noise_ceiling",
    "pearson",
    "spearman",
]
