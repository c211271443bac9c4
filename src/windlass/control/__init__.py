"""Control plane: the coordinator, its agents, their messages, and the state machine of a round."""
