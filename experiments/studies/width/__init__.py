"""Quality of the error bars against the width of the net (paper, appendix on the width)."""
