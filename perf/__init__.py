"""Measurements of the engine against its peers; nothing of the package imports this."""
