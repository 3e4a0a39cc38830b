"""Other libraries, measured beside this one in environments of their own."""
