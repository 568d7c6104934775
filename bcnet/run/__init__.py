"""From a network and a budget to a slim network: recipe, folder, stages, export, and ``slim``."""
