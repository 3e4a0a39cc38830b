"""Speed, memory and accuracy of ``rigidities``, each as a ratio measured within one run.

``python -m benchmarks`` runs everything, ``python -m benchmarks speed memory`` the benchmarks
named. Each module has a ``run(quick=...)`` that returns rows of a table; ``frame`` has what they
share: the workload, the clock, the rows and the page. ``before_and_after`` is a command of its own
that compares the numbers of two checkouts. Tasks that are compared take turns (A B C,
B C A, ...), so that a slow moment of the machine hits all alike.
"""
