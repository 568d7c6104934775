"""Scoring every configuration of a space at once, sharing the work of equal prefixes."""
