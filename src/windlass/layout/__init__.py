"""WHERE bytes live: boxes, manifests and topologies. No torch, no I/O."""
