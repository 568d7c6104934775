"""bcnet: find the best channel widths of a convolutional network under a budget."""

__version__ = "0.1.0"
