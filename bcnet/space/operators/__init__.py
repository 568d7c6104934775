"""How labels pass through operators: one small rule per kind of operator.

A rule takes a :class:`Call` and returns the :class:`Value` (or list of values) the operator makes,
linking the labels that must agree. Operators that torch itself tags as pointwise share one rule.
To teach bcnet an operator of your own::

    @bcnet.space.rule("mylib::gate")
    def gate(call):
        return call.together("x", "scale")
"""

from bcnet.space.operators import channelwise, movement, products
from bcnet.space.operators.base import RULES, Call, rule

__all__ = ["RULES", "Call", "channelwise", "movement", "products", "rule"]
