"""Stopping after a time t against a ridge: the filter exp(-2 eta c lambda t) (paper, Sec. 3.5)."""
