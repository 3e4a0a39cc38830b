"""Quality of the error bars against the width of the network (paper, appendix on the width)."""
