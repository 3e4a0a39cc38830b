"""How good error bars are: scores, floors, pictures, and the library's calibrations."""
