"""The stages of a run, each a function of what the run folder holds already.

A stage reads everything from the folder, even what the stage before it just had in its hands: so it cannot matter
whether the run was stopped in between.
"""
