"""Error bars of functions of many predictions."""
