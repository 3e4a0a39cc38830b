"""What a fit learns from the data: blocks of rows, and the statistics that take them in."""
