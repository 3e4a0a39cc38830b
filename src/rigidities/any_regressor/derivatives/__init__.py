"""Derivatives of any regressor by its parameters, sample by sample."""
