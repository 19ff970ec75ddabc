"""Cases: drawn by strategies, named as scenarios, made smaller by the shrinker."""
