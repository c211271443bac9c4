"""WHICH bytes go where: manifests in, TransferPlan out. No torch, no I/O, no clock."""
