"""Other ways to error bars, trained and judged like the rigidities; and published figures."""
