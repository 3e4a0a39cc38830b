"""What the chosen ridge stands for (paper, appendix on the role of the regularizer)."""
