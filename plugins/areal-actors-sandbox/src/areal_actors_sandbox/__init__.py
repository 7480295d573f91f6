"""Sandboxes that isolate the commands of an episode: bubblewrap, docker, podman, apptainer.

``rollout.openai.sandbox`` names a backend; ``areal_actors.sandbox`` has its settings and the interface of boxes.
"""
