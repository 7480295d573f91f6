"""Inference servers as engines: what they have in common, and one dialect for each kind of server.

``dialect`` is what a kind of server has to tell and to do; ``engine`` makes an ``Engine`` of one or several servers
that speak it. The dialects are ``sglang`` and ``vllm``.
"""
