"""Molecules of QM9 with a net of atoms: energies, atoms and forces with error bars (Sec. 4.3)."""
