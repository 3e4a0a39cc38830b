"""Models of atoms: structures, SOAP descriptors, a Behler-Parrinello network."""
