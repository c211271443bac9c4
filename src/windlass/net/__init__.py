"""Communication with peers: addresses, sockets, servers, clocks, logs."""
