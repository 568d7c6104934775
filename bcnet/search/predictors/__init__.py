"""Models of scores: the Gaussian-process surrogate and the log-width model."""
