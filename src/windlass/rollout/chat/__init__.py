"""OpenAI-compatible endpoint in front of the engines: every request of an agent becomes a turn of one rollout."""
