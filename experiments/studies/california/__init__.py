"""Error bars inside and outside the training domain, on California housing (paper, Sec. 4.5)."""
