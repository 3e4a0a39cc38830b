"""How errors and bars follow the kinds and sizes of molecules."""
