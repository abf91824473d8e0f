"""staticmem: how much GPU memory a model needs, from its exported graph alone."""

__version__ = "0.1.0"
