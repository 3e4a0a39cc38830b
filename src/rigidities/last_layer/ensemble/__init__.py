"""Last-layer ensembles."""
