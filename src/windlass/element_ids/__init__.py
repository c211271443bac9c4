"""Numbers of tensor elements, written into values and read back from the memory that some code has filled."""
