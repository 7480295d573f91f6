"""Syntax of tools, calls and reasoning: ``json_families`` and ``tagged`` are tables of families, others have a module.

``base`` defines what a format is, ``rendering/parsers.py`` lists the formats by name.
"""
