"""How much F F^T and the empirical NTK move while a net is trained (paper, appendix on the NTK)."""
