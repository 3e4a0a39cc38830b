"""Clusters of copper and gold: error bars of energies and forces, near and far."""
