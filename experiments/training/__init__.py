"""Training shared by the experiments: many small networks at once, larger ones in a loop."""
