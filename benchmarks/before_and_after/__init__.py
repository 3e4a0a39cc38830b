"""Does a change of the code change a number? Results of two checkouts, compared name by name.

From the root of the checkout that has this package:

    PYTHONPATH=BEFORE/src python -m benchmarks.before_and_after write before.npz
    PYTHONPATH=AFTER/src python -m benchmarks.before_and_after write after.npz
    python -m benchmarks.before_and_after compare before.npz after.npz

`verbs` says how each state of the code is called, `problems` makes small models and data, `cases`
and `other_cases` compute results with the verbs, `results` names and stores them, and `comparison`
compares two files.
"""
