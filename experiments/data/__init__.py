"""Readers of the data sets, each from a folder that the user names."""
