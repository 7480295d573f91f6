"""A model of a service at a scale that no one machine has: real actors, simulated engines and agents, virtual time.

The capacity granter, the session manager, the router, the generation actors, the exporter and the rollout runner are
the ones that serve; thousands of sessions talk to a thousand engines that only pretend to sample. Waiting costs
nothing, because the clock jumps; what the actors compute is measured as it happens, actor by actor::

    python -m benchmarks.simulation --sessions 10000 --engines 1000
    python -m benchmarks.simulation validate --sessions 1000        # the model against real sockets

``meter`` says whose CPU time it was, ``engines`` and ``agents`` are what is simulated, ``model`` puts it together,
``findings`` says what saturates first, ``validation`` holds the model against a real run.
"""
