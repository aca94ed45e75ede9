"""Communication: the exchange (collectives and the only byte counter), the FSDP2 adapter, the layer policy."""
