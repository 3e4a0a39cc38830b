"""How fast the Gram of the last features tends to the NNGP with the width (paper, Sec. 3.5)."""
