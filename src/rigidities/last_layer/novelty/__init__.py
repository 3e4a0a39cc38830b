"""What entered every layer of a model in training, and how far other inputs lie from it."""
