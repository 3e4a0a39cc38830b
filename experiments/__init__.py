"""The paper's figures and tables, and checks of its theory: ``python -m experiments <name>``."""
