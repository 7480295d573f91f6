"""Families of models, a module each: how they write tools and calls, and how they set their thinking apart.

What a format has to do is said in ``rendering/parsers.py``, whose tables know the formats by name.
"""
