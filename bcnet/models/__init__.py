"""The paper's networks as plain modules, built from a list of widths.

Names and widths are known without torch; :func:`build` imports the family's module.
"""

from bcnet.models.registry import MODELS, ZooModel, build, find

__all__ = ["MODELS", "ZooModel", "build", "find"]
