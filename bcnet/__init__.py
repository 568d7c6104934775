"""bcnet: find the best channel widths of a convolutional network under a budget."""
