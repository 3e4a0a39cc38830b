"""Error bars of forces of molecules: exact, from ensembles, by brute force; and their time."""
