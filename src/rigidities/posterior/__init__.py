"""Gram, posterior and what is drawn from it."""
