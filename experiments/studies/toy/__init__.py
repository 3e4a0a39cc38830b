"""Seven points of cos^2 x, three kinds of models, calibrated error bars (paper, Fig. 1)."""
