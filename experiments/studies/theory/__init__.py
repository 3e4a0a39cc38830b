"""The wide-net theory behind the last-layer form, and how far it holds (paper, Sec. 3)."""
