"""The version of the package and that of PyTorch; pyproject.toml has the same."""

__version__ = "0.1.0"

# The PyTorch that the rules follow. It runs the step where nothing else is said (`--torch-version`), exported
# `models/`, and tests compare with it (extra `dev`). Readings that another version made say so where they stand.
REFERENCE_TORCH = "2.13.0"
