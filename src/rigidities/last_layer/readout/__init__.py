"""Finding a model's readout and reading its features."""
