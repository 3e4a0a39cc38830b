"""What users hand in, and what is kept in files."""
