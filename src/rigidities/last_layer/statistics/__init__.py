"""What a fit learns from its data: blocks of rows, and the statistics that take them in."""
