"""Error bars of molecules of every size: the paper's calibrations beside the library's default."""
