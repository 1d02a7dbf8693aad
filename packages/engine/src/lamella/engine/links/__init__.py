"""Roads between a client and an engine core: a process of its own, or a thread of this one."""
