"""Plan an update of a cluster that does not exist: the bytes that it moves, and an estimate of its time.

Run `python -m tools.plan TOPOLOGY.toml` from the root of the source tree. The planner is the library's; this package
makes the manifests and models the fabric.
"""
