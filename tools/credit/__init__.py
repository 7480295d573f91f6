"""Jobs on the tiny model that only learn if the reward of an episode reaches the turns that earned it."""
