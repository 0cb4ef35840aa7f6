"""Version of the package, apart from its face, so that every module may import it."""

__version__ = "0.1.0"
