"""SGLang through its own weight table: agents beside a server that has no code of ours in it."""
