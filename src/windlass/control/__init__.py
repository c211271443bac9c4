"""Control plane: the coordinator, its agents, their messages, and the state machine of a round.

A plan says which source writes which bytes to which engine rank. A link is the part of a plan from one source to one
destination. Ranks bind a plan: they exchange the addresses of its links. A round is one attempt to publish one version
over the bound links. The sources are trainer ranks; in a catch-up, the sources are the ranks of an engine (the donor)
that sends the published version to an engine that is behind (the newcomer). A replica is a trainer rank's copy of its
weights, from which it sends.
"""
