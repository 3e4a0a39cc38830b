"""Training shared by the experiments: many small nets at once, larger ones in an ordinary loop."""
