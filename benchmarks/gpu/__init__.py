"""Measure engine and trainer on a GPU: one command for a machine with torch and transformers, and no network.

::

    PYTHONPATH=src python -m benchmarks.gpu --out DIR            everything, in at most eight minutes
    PYTHONPATH=src python -m benchmarks.gpu --only trainer --model 4b
    PYTHONPATH=src python -m benchmarks.gpu --device cpu --quick  the same sections with a tiny model (a smoke test)
    python -m benchmarks.gpu keep DIR/report.json                copy a run into the repository and write its pages

::

    __main__.py  the command line and one process per section    cells.py    what runs inside such a process
    models.py    models made from a configuration                groups.py   synthetic groups of branching sessions
    ceilings.py  section machine     engine.py  section engine   trainer.py  section trainer
    weights.py   section weights     pages.py   the pages that the results are shown on

The package itself does not have to be installed: areal_actors is imported from ``src``.
"""
