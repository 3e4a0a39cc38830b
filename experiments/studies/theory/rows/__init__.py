"""What is left at t = infinity when rows outnumber features (law of the limit; paper, Sec. 3.5)."""
