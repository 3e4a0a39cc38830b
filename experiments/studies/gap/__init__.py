"""A gap between training rows: error bars beside those of other methods on the same network."""
