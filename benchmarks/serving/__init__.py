"""What it costs and takes to serve strangers' programs."""
