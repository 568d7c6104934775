"""What may vary: width variables, their coupling, networks at given widths, and their costs."""
