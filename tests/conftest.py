"""Shared by all tests: hypothesis draws the same examples in every run, so that a red run can be repeated."""

from hypothesis import settings

settings.register_profile("bcnet", deadline=None, derandomize=True)
settings.load_profile("bcnet")
