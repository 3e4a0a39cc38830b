"""A mean and what lies around it."""
