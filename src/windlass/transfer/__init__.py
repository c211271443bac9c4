"""Move bytes: plans bound to addresses, a sender in each trainer rank and a receiver in each engine rank."""
