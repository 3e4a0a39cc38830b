"""What is left at t = infinity when rows outnumber features (distribution of the limit; paper, Sec.
3.5)."""
