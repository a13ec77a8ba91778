"""Settings by measurement: what `compiled-engine tune` runs."""
