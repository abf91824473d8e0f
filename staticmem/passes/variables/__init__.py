"""What Python's frames hold beyond the last use of a value: by source lines, or by policy."""
