"""Families of models, one per module: the syntax of their tools and calls, and of their reasoning.

``rendering/parsers.py`` defines the protocol of a format, and lists the formats by name.
"""
