"""One HTML page of an experiment's JSON file: plots first, then metrics, then everything else.

``python -m experiments.frame.html_page experiments/results/toy/toy.json --out toy.html`` writes it.
`recognised` finds what can be drawn or compared, `nested` makes tables of the remaining numbers,
and `page` puts them together.
"""

from experiments.frame.html_page.page import experiment_page

__all__ = ["experiment_page"]
