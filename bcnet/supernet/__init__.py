"""How widths share weights: the principle that picks channels, and the supernet that holds them."""
