"""The bytes: host slab, movers between device, host and stores. Only the device movers need torch."""
