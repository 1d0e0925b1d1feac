"""Where the time of a round goes, phase by phase, on the host and on the device."""
