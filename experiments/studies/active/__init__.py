"""Which rows to label next: learning curves of random and of greedy batches."""
