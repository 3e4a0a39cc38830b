"""The benchmark of probabilistic backpropagation: the paper's table, with rivals run beside."""
