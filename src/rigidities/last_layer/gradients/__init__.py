"""Derivatives by the inputs, their error bars, and training losses that contain derivatives."""
