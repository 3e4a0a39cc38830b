"""The rigidity as a likelihood: the constrained loss against its Laplace approximation."""
