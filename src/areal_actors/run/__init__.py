"""The composition root: the only package that knows every actor and wires them together.

A run is put together in one way, whether it is one process or many::

    training, serving ──▶ plan ──▶ controller ──▶ openers ──▶ inference (engine, sessions, proxy), training, rollouts
                                       └────────▶ control_plane, supervise ──▶ worker ──▶ openers

``training`` runs over a dataset and ``serving`` takes sessions from external agents. ``openers`` has one opener for
each role, and the controller calls it in its own process for each role that the plan places in no worker.
``inference.open_inference`` opens the actors that answer agents, without a run.
"""
