"""What error bars cost: training and predictions by several methods, timed (paper, table 1)."""
