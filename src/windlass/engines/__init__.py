"""Engine adapters: what lives inside a rollout engine."""
