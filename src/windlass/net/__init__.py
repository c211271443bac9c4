"""What every room uses to speak to a peer: addresses, sockets, servers, clocks, logs."""
