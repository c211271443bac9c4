"""Element numbers: Windlass codes them into tensors, a framework's own code loads or exports these, and Windlass reads them."""
