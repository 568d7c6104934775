"""How long networks take: timing them, and a table from which latency becomes a cost of the widths."""
