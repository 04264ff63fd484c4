"""``make check-gpu``: whether what runs on a CPU runs on the device of this machine."""
