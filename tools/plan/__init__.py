"""Planning on paper: what an update of a cluster that is not there would move, and how long it takes.

`python -m tools.plan TOPOLOGY.toml`, from the root of the source tree. The planner is the library's;
manifests, speeds and the simulated fabric are made here.
"""
