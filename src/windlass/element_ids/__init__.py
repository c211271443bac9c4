"""Element numbers: coded into the values of tensors, loaded by other code, and read from the memory that it filled."""
