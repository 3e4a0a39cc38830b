"""Pages of the experiments' JSON files."""
