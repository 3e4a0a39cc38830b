"""What to label next: learning curves of molecules."""
