"""Tests for authors of plug-ins: contracts, fakes at the plug points, chat templates of many models, exact gradients.

``engine_contract``, ``journal_contract`` and ``sandbox_contract`` check what you implement. ``sglang_server`` and
``vllm_server`` are small servers over any engine, ``serving`` is the proxy in front of a script, ``remote`` connects
actors through memory, ``faults`` corrupts answers of an engine. ``families`` has chat templates, ``exactness``
compares rows with the engine's tokens, and ``gradients`` computes the bias of an estimator.
"""
