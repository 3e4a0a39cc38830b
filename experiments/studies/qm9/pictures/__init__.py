"""Which atoms are uncertain: molecules drawn with their atoms' bars."""
