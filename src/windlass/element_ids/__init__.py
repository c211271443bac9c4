"""Element numbers, as values of tensors that a framework's own code loads or exports.

Windlass reads the numbers from the resulting memory or tensors.
"""
