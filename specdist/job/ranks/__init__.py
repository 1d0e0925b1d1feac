"""Processes of a replica: topology, start, signals, logs, and the watchdog that ends a stuck one."""
