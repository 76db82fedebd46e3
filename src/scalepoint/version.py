"""The version of this package: a module of its own, so that what writes it down need not import the whole."""

__version__ = "0.1.0"
