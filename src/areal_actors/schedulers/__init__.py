"""Where workers run: child processes of this machine, or jobs of a Slurm cluster, behind one protocol.

``base`` says what a scheduler does. It places processes and knows how they fare; what runs in them, and how they find
the run that they belong to, is ``run.placement``.
"""
