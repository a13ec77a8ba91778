"""Compiling: the driver, and the one file with private torch names."""
