"""What bcnet knows about operators: a table with one entry per operator (see :mod:`bcnet.space.operators.table`).

Operators that torch itself tags as pointwise need no entry. To teach bcnet an operator of your own::

    bcnet.space.operators.register("mylib::gate", couple=lambda call: call.together("x", "scale"))
"""

from dataclasses import replace

from bcnet.space.operators import channelwise, movement, products, shapes
from bcnet.space.operators.base import Call
from bcnet.space.operators.table import OPERATORS, Operator, Site, register, rule

# An entry of this table without ``macs`` multiplies nothing; for a user's entry without them torch's counter is asked.
for _name, _entry in OPERATORS.items():
    OPERATORS[_name] = replace(_entry, macs=_entry.macs or (lambda site: ()), taught=False)

__all__ = ["OPERATORS", "Call", "Operator", "Site", "channelwise", "movement", "products", "register", "rule", "shapes"]
