"""Scripts of the source tree. The installed package does not contain them."""
