"""HOW bytes move: one-sided writes behind one protocol."""
