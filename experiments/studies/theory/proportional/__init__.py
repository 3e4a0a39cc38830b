"""Is the NTK a constant times the NNGP, and does the variance mind? (paper, Sec. 3.5)."""
