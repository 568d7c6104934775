"""Ways to choose the next configurations: evolution, greedy slimming, and baselines."""
