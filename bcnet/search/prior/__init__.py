"""The paper's prior population: configurations drawn where training losses were low."""
