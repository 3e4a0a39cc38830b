"""Speed, memory and accuracy of ``rigidities``, each as a ratio measured within one run.

``python -m benchmarks`` runs everything, ``python -m benchmarks speed memory`` the named parts.
What is compared is interleaved (A B C, B C A, ...): a slow moment of the machine hits all alike.
"""
