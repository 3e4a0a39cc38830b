"""Derivatives by the inputs, their error bars, and losses that hold them."""
