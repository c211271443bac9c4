"""Stage timers and measured ceilings."""
