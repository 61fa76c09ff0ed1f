"""Files, processes, devices and measurements."""
