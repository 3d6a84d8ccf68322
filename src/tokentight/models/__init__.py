"""Architectures, configuration and weight loading."""
